"""Questions about the past: what a log shows about its workers, and why.

`explain` tells for one prompt why each worker holds no more of it. `audit` tells what went wrong in a whole log, and
where cached tokens were lost.
"""
