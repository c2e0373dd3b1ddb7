"""A small language model over bytes: training on a text, and sampling.

python -m quasar_kernels.blocks.language train --text FILE --out FOLDER
python -m quasar_kernels.blocks.language sample --model FOLDER --prompt "Once"
"""
