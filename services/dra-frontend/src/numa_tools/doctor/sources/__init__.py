# SPDX-License-Identifier: Apache-2.0
"""One module for each place that facts are read from. Every read is bounded, fails softly, and changes nothing."""
