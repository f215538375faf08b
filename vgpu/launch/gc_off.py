"""Imported ahead of others, in a process that only imports: Python looks for no garbage meanwhile.

Modules make millions of objects, none of them garbage, and each search goes through more of them: a
quarter of the time that torch takes. Whoever imports this enables ``gc`` again.
"""

import gc

gc.disable()
