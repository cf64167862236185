"""Commands of `eagle3` by topic; `eagle3.cli` registers them."""
