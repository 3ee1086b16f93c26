// Types of shared.js, which is served from the report's folder (report/page/shared.js).

type Attribute = string | number | boolean | null | undefined | ((event: any) => void);
export type Attributes = Record<string, Attribute>;
type Child = Node | string | null | undefined | false;
export type Children = Child | Child[];
export type Ends = [far: number, alike: number];
export interface PlacedLabel { x: number; y: number; far: boolean; from: [number, number]; to: [number, number] }

export const LABEL: number;
export const LEVELS: number;
export function element<K extends keyof HTMLElementTagNameMap>(tag: K, attributes?: Attributes, children?: Children): HTMLElementTagNameMap[K];
export function shape<K extends keyof SVGElementTagNameMap>(tag: K, attributes?: Attributes, children?: Children): SVGElementTagNameMap[K];
export function clamp(value: number, low: number, high: number): number;
export function redrawn<E extends HTMLElement>(host: E, draw: (width: number) => void): E & { redraw: () => void };
export function widthOf(text: string, size?: number): number;
export function shortened(name: string, room: number, size?: number): string;
export function placedLabels(
  points: [number, number][], widths: number[], room: { width: number; height: number; radius?: number },
): (PlacedLabel | null)[];
export function colours(ramp: string[]): string[];
export function levelOf(value: number, ends: Ends): number;
export function inkOn(level: number): string;
