"""The papers that measures cite, by key: what to call them, and where they are."""

from __future__ import annotations

from typing import NamedTuple


class Paper(NamedTuple):
    """A paper as a page or a table cites it."""

    citation: str
    link: str = ""  # DOI or arXiv, where there is one

    @property
    def short(self) -> str:
        """Authors and year."""
        return self.citation.partition(",")[0]


_ARXIV, _DOI = "https://arxiv.org/abs/", "https://doi.org/"

PAPERS = {
    "atoms2023": Paper("Anonymous 2023, Exploring neural network representational similarity using filter subspaces"),
    "barannikov2022": Paper("Barannikov et al. 2022, Representation topology divergence", f"{_ARXIV}2201.00058"),
    "bhatia2019": Paper(
        "Bhatia et al. 2019, On the Bures–Wasserstein distance between positive definite matrices",
        f"{_ARXIV}1712.01504",
    ),
    "boixadsera2022": Paper(
        "Boix-Adserà et al. 2022, GULP: a prediction-based metric between representations", f"{_ARXIV}2210.06545"
    ),
    "bures1969": Paper("Bures 1969, An extension of Kakutani's theorem on infinite product measures"),
    "cristianini2001": Paper("Cristianini et al. 2001, On kernel-target alignment"),
    "cui2022": Paper(
        "Cui et al. 2022, Deconfounded representation similarity for comparison of neural networks",
        f"{_ARXIV}2202.00095",
    ),
    "diedrichsen2020": Paper(
        "Diedrichsen et al. 2020, Comparing representational geometries using whitened distances", f"{_ARXIV}2007.02789"
    ),
    "duong2023": Paper(
        "Duong et al. 2023, Representational dissimilarity metric spaces for stochastic neural networks",
        f"{_ARXIV}2211.11665",
    ),
    "facco2017": Paper(
        "Facco et al. 2017, Estimating the intrinsic dimension of datasets", f"{_DOI}10.1038/s41598-017-11873-y"
    ),
    "geirhos2020": Paper(
        "Geirhos et al. 2020, Beyond accuracy: quantifying trial-by-trial behaviour of CNNs and humans",
        f"{_ARXIV}2006.16736",
    ),
    "gelfand1959": Paper(
        "Gelfand and Yaglom 1959, Calculation of the amount of information about a random function contained in "
        "another such function"
    ),
    "gretton2005": Paper("Gretton et al. 2005, Measuring statistical dependence with Hilbert-Schmidt norms"),
    "hamilton2016": Paper("Hamilton et al. 2016, Cultural shift or linguistic drift?", f"{_ARXIV}1606.02821"),
    "higham2002": Paper(
        "Higham 2002, Accuracy and stability of numerical algorithms", f"{_DOI}10.1137/1.9780898718027"
    ),
    "huh2024": Paper("Huh et al. 2024, The platonic representation hypothesis", f"{_ARXIV}2405.07987"),
    "ilharco2023": Paper("Ilharco et al. 2023, Editing models with task arithmetic", f"{_ARXIV}2212.04089"),
    "khosla2024": Paper("Khosla and Williams 2024, Soft matching distance", f"{_ARXIV}2311.09466"),
    "klabunde2023": Paper(
        "Klabunde and Lemmerich 2023, On the prediction instability of graph neural networks", f"{_ARXIV}2205.10070"
    ),
    "klabunde2025": Paper("Klabunde et al. 2025, Similarity of neural network models: a survey", f"{_ARXIV}2305.06329"),
    "kornblith2019": Paper(
        "Kornblith et al. 2019, Similarity of neural network representations revisited", f"{_ARXIV}1905.00414"
    ),
    "kriegeskorte2008": Paper(
        "Kriegeskorte et al. 2008, Representational similarity analysis", f"{_DOI}10.3389/neuro.06.004.2008"
    ),
    "li2015": Paper("Li et al. 2015, Convergent learning", f"{_ARXIV}1511.07543"),
    "lin1991": Paper("Lin 1991, Divergence measures based on the Shannon entropy", f"{_DOI}10.1109/18.61115"),
    "miao2021": Paper("Miao et al. 2021, Continual learning with filter atom swapping"),
    "may2019": Paper(
        "May et al. 2019, On the downstream performance of compressed word embeddings", f"{_ARXIV}1909.01264"
    ),
    "milanifard2016": Paper("Milani Fard et al. 2016, Launch and iterate: reducing prediction churn"),
    "mirsky1960": Paper(
        "Mirsky 1960, Symmetric gauge functions and unitarily invariant norms", f"{_DOI}10.1093/qmath/11.1.50"
    ),
    "morcos2018": Paper(
        "Morcos et al. 2018, Insights on representational similarity with canonical correlation", f"{_ARXIV}1806.05759"
    ),
    "neyshabur2020": Paper(
        "Neyshabur et al. 2020, What is being transferred in transfer learning?", f"{_ARXIV}2008.11687"
    ),
    "nili2014": Paper(
        "Nili et al. 2014, A toolbox for representational similarity analysis", f"{_DOI}10.1371/journal.pcbi.1003553"
    ),
    "pearson1895": Paper(
        "Pearson 1895, Note on regression and inheritance in the case of two parents", f"{_DOI}10.1098/rspl.1895.0041"
    ),
    "raghu2017": Paper("Raghu et al. 2017, SVCCA", f"{_ARXIV}1706.05806"),
    "rudelson2007": Paper("Rudelson and Vershynin 2007, Sampling from large matrices", f"{_ARXIV}math/0503442"),
    "schonemann1966": Paper(
        "Schönemann 1966, A generalized solution of the orthogonal Procrustes problem", f"{_DOI}10.1007/BF02289451"
    ),
    "schrimpf2018": Paper(
        "Schrimpf et al. 2018, Brain-Score: which artificial neural network for object recognition is most brain-like?",
        f"{_DOI}10.1101/407007",
    ),
    "song2012": Paper("Song et al. 2012, Feature selection via dependence maximization"),
    "szekely2007": Paper(
        "Székely et al. 2007, Measuring and testing dependence by correlation of distances",
        f"{_DOI}10.1214/009053607000000505",
    ),
    "szekely2013": Paper(
        "Székely and Rizzo 2013, The distance correlation t-test of independence in high dimension",
        f"{_DOI}10.1016/j.jmva.2013.02.012",
    ),
    "szekely2014": Paper(
        "Székely and Rizzo 2014, Partial distance correlation with methods for dissimilarities",
        f"{_DOI}10.1214/14-AOS1255",
    ),
    "tang2020": Paper("Tang et al. 2020, Similarity of neural networks with gradients", f"{_ARXIV}2003.11498"),
    "tsitsulin2020": Paper(
        "Tsitsulin et al. 2020, The shape of data: intrinsic distance for data distributions", f"{_ARXIV}1905.11141"
    ),
    "walther2016": Paper(
        "Walther et al. 2016, Reliability of dissimilarity measures for multi-voxel pattern analysis",
        f"{_DOI}10.1016/j.neuroimage.2015.12.012",
    ),
    "wang2022": Paper("Wang et al. 2022, Understanding weight similarity of neural networks via chain normalization"),
    "wcka2025": Paper(
        "Anonymous 2025, Benchmarking a well-calibrated measure of weight similarity (under review at ICLR)"
    ),
    "wang2020": Paper("Wang et al. 2020, Towards understanding the instability of network embedding"),
    "wang_isola2020": Paper("Wang and Isola 2020, Alignment and uniformity on the hypersphere", f"{_ARXIV}2005.10242"),
    "williams2021": Paper(
        "Williams et al. 2021, Generalized shape metrics on neural representations", f"{_ARXIV}2110.14739"
    ),
    "yamins2014": Paper(
        "Yamins et al. 2014, Performance-optimized hierarchical models predict neural responses",
        f"{_DOI}10.1073/pnas.1403112111",
    ),
    "yin2018": Paper("Yin and Shen 2018, On the dimensionality of word embedding", f"{_ARXIV}1812.04224"),
}


def cited(keys: str) -> list[Paper]:
    """The papers of a measure's declared keys, which are separated by commas; those that are not known are left out."""
    return [PAPERS[key] for part in keys.split(",") if (key := part.strip()) in PAPERS]
