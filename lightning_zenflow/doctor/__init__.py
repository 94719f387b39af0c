"""Report of this machine and what to expect of it: the command `lightning-zenflow doctor`.

Code enters that looks at the machine at hand or measures it for a report; training does not import it.
"""
