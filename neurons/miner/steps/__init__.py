"""The steps of the cycle, one module for each: publish, measure, claim, commit and
reveal (or submit), follow.
"""
