"""Reports as one HTML file that needs no network: tables, and plots by Bokeh.

Start at `page.write_page`; then read `plots` (what is drawn) and `audit_page` (the report of an audit).
Needs the extra `analysis`.
"""
