"""Structured output: what a request asks for as one Lark grammar, and masks of the tokens that may
come next.
"""
