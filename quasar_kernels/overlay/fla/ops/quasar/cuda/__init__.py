"""CUDA C++ on any machine with torch: compiling by NVRTC, loading and launching by the driver."""
