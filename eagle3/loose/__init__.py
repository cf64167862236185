"""Loose reply files: recorded requests and replies that no run of ours made, to token ids with grades.

`reading` turns lines of many shapes into completions, `families` chooses each line's grammar, `rebuilding` composes
them with profiles, reconstruction and the audit's rules. Like `eagle3.stages`, this stands above the stages.
"""
