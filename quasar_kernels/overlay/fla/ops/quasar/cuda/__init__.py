"""CUDA C++ on any machine with torch: compiling by NVRTC, loading and launching by the driver."""

# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
