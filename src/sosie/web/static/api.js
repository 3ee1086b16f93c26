// What the server answers, and how it is asked.
export async function ask(path, parameters = {}, options = {}) {
    const query = new URLSearchParams();
    for (const [name, value] of Object.entries(parameters)) {
        if (value !== null && value !== undefined && value !== "")
            query.set(name, String(value));
    }
    const text = query.toString();
    let answer;
    try {
        answer = await fetch(`api/${path}${text ? `?${text}` : ""}`, options);
    }
    catch (error) {
        if (error.name === "AbortError")
            throw error;
        throw new Error("The server does not answer. Is `sosie serve` still running?");
    }
    if (answer.ok)
        return answer.json();
    const said = await answer.json().catch(() => null);
    throw new Error(said?.error ?? `The server answered ${answer.status}.`);
}
// The number of a model that an address names by its number or by its name.
export async function numberOf(part, signal) {
    if (/^\d+$/.test(part))
        return Number(part);
    let name = part;
    try {
        name = decodeURIComponent(part);
    }
    catch { /* a % that is part of the name */ }
    return (await ask("named", { name }, { signal })).id;
}
