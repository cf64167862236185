"""Text to ids and back: tokenizers, response grammars, prompt rendering, provider profiles, reconstruction.

Pure apart from loading files. `grammar` says how a model writes, `tokenizer` turns text into ids, `rendering` turns a
conversation into prompt ids, `layout` and `reconstruct` turn one completion into ids, `profiles` learns what a provider
does to the text in between.
"""
