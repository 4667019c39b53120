"""The page at `/`: its files, and the routes from which it takes what it shows.

Start at `state.PageState`, which is what there is to show at one moment: now, or a moment of a log that is replayed.
`fleet` and `residency` describe it, and `routes` serves the descriptions. `api.static_files` serves the files.
"""
