KILLED=("killed","timeout","crash")
def record(*a,**k): pass
def summary(rows, stages): return ""
