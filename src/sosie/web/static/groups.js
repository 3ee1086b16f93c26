// Models in groups, each with a colour: by architecture, task, tag, base model or cluster.
const COLOURS = 8;
const MORE_COLOURS = 12; // for clusters, which lie apart on the map
const NONE = "none said";
const OTHERS = "others";
export function grouped(models, by) {
    return labelled(models, labelling(models, by), COLOURS);
}
// A cluster is called by the model in its middle.
export function clustered(models, found) {
    const names = new Map(found.groups.map((group) => [group.cluster, group.centre.name]));
    const of = new Map(found.ids.map((id, k) => [id, names.get(found.clusters[k])]));
    return labelled(models, (model) => of.get(model.id) ?? NONE, MORE_COLOURS);
}
function labelled(models, labels, colours) {
    const counts = new Map();
    for (const model of models)
        counts.set(labels(model), (counts.get(labels(model)) ?? 0) + 1);
    const most = [...counts].filter(([name]) => name !== NONE).sort((a, b) => b[1] - a[1] || (a[0] < b[0] ? -1 : 1));
    const shown = most.length > colours ? most.slice(0, colours - 1) : most;
    const rest = most.slice(shown.length).reduce((sum, [, count]) => sum + count, 0);
    const groups = shown.map(([name, count], colour) => ({ name, count, colour }));
    if (rest)
        groups.push({ name: OTHERS, count: rest, colour: null });
    if (counts.has(NONE))
        groups.push({ name: NONE, count: counts.get(NONE), colour: null });
    const place = new Map(groups.map((group, k) => [group.name, k]));
    return { groups, of: (model) => place.get(labels(model)) ?? place.get(OTHERS) };
}
function labelling(models, by) {
    if (by === "architecture")
        return (model) => model.architecture;
    if (by === "task")
        return (model) => model.task ?? NONE;
    if (by === "base")
        return baseOf(models);
    // Of several tags the one that most models have and yet not all: it tells more than a rare one.
    const counts = new Map();
    for (const model of models)
        for (const tag of model.tags)
            counts.set(tag, (counts.get(tag) ?? 0) + 1);
    const told = (tag) => (counts.get(tag) === models.length ? 0 : counts.get(tag));
    return (model) => [...model.tags].sort((a, b) => told(b) - told(a) || (a < b ? -1 : 1))[0] ?? NONE;
}
// The first of the line of parents, as far as the zoo has them.
function baseOf(models) {
    const parents = new Map(models.map((model) => [model.name, model.parent]));
    const bases = new Set(models.map((model) => model.parent).filter((name) => name !== null));
    return (model) => {
        let name = model.name;
        for (let steps = 0; steps < 100; steps += 1) {
            const parent = parents.get(name);
            if (parent === null || parent === undefined)
                break;
            name = parent;
        }
        return name !== model.name || bases.has(name) ? name : NONE;
    };
}
