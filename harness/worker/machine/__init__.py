"""The machine as its worker sees it: GPU state, software, heat, and a control calculation."""
