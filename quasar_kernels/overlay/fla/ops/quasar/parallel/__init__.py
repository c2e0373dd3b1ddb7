"""One sequence over the ranks of a process group: contexts, the exchange, and both passes."""

# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
