"""Do modules of other libraries train as under Lightning's own strategy?"""
