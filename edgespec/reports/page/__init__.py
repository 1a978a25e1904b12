"""A page that shows a measurement to somebody else: one file, without scripts and without anything from elsewhere."""

from __future__ import annotations

from edgespec.reports.page.write import check_page, write_page

__all__ = ["check_page", "write_page"]
