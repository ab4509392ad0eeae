"""The gate's check: plans found where people keep them, judged, told of and mended."""
