"""A look-alike of the OpenRouter API that answers from recorded text, charges a pretend account and fails by script.

It exists so that demonstrations, tests and rehearsals exercise the same HTTP, money and failure paths as a paid run.
It knows the wire and nothing of the pipeline: no stage imports it, and it imports no stage.
"""
