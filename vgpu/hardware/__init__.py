"""GPUs, links and networks from datasheets, and how well a matrix product fills a GPU."""
