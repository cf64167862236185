"""Talking to models over HTTP: what to send, what came back, whether it was paid for.

`base` has the protocol and its records, `transport` carries 2000 connections under httpx, `wire` reads replies,
`classify` says what a failed request means for the sample and for the money, `policy` chooses endpoints and prices.
Nothing here retries, waits or keeps accounts: that is `eagle3.generation`.
"""
