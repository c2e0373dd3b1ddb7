"""What each kernel needs of a GPU, by the compilers: registers, spills, shared memory."""
