"""Records and contracts that everything else meets over: requests, steps, replicas, costs, metrics, errors, clock."""
