"""The page at `/`: its files, and the routes from which it takes what it shows.

Start at `scene.PageState`, which is what there is to show at one moment: now, or a moment of a log that is replayed.
`fleet`, `residency` and `funnel` describe it, `routes` serves the descriptions, and `site` serves the files in
`static`.
"""
