# SPDX-License-Identifier: Apache-2.0
"""Which CPUs of a topology. Pure; it knows CPUs and parameters, but no claim."""
