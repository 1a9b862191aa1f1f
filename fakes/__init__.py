"""Fakes: a coded policy, an engine that answers from it, faces, reference resume managers, known
bugs.
"""
