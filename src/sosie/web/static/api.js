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
