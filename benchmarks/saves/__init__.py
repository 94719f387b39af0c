"""How long does a save stop training?"""
