# SPDX-License-Identifier: Apache-2.0
"""Enforces claims in hooks and audits. Only this package waits for containers to leave a claim's CPUs, and only this
package writes to containers' cgroups.
"""
