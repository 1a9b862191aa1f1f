"""Test doubles: a coded policy, engines and servers that sample from it, reference clients and
trainers, and known bugs.
"""
