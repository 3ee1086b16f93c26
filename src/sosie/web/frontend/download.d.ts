// Types of download.js, which is served from the report's folder (report/page/download.js).

export type Lines = (string | number | null)[][]; // heads first

export function downloads(names: string[], lines: () => Lines, drawing?: () => SVGSVGElement): HTMLElement;
