"""Many networks as points of a space: their mean, the ways between them, what varies, groups, maps.

`space.py` works on rows of activations, under Procrustes distances; `distances.py` where only distances are known.
"""

from .distances import medoids, spherical_mds
from .space import MeanShape, geodesic, kmeans, mean_shape, tangent_pca

__all__ = ["MeanShape", "geodesic", "kmeans", "mean_shape", "medoids", "spherical_mds", "tangent_pca"]
