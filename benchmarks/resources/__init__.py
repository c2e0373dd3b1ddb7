"""Resource usage of each kernel by the compilers' output: registers, spills, shared memory."""
