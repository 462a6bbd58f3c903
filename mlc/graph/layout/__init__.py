"""Blocked layouts: what each operator could work in and costs there (``regions``), the choice for the whole graph
(``assign``), the graph in the layouts chosen (``blocked``), and weights packed for them (``packing``)."""
