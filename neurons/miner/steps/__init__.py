"""The arrows of the cycle, one file a step: publish, measure, claim, commit and
reveal (or submit), follow.
"""
