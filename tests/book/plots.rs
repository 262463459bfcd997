//! Plots of the book, drawn from tables: those of its pages, which other tests hold to measurements, and
//! `src/advice/tables/*.yaml`.

use std::fmt::Write;

use serde_json::Value as Json;

use crate::common::folder::repository;

/// All plots: names of files and SVG.
pub fn all() -> Vec<(&'static str, String)> {
    vec![
        ("plot-speed.svg", speed()),
        ("plot-formats.svg", formats()),
        ("plot-bandwidth.svg", bandwidth()),
        ("plot-feedback.svg", feedback()),
    ]
}

/// Colors of both schemes; the panel makes a plot legible on any page.
const STYLE: &str = "<style>\
    text{font:13px system-ui,sans-serif;fill:#1c2733}.panel{fill:#fdfdfb}.rule{stroke:#9aa5b1;fill:none}\
    .faint{stroke:#d5dae0}.a{fill:#0b63b5;stroke:#0b63b5}.b{fill:#c2500a;stroke:#c2500a}.small{font-size:11px}\
    @media (prefers-color-scheme: dark){text{fill:#e4e9ee}.panel{fill:#1b2128}.rule{stroke:#77828e}.faint{stroke:#38424c}\
    .a{fill:#6db3f2;stroke:#6db3f2}.b{fill:#f0a36b;stroke:#f0a36b}}</style>";

struct Plot {
    svg: String,
}

impl Plot {
    fn new(width: f64, height: f64, title: &str) -> Plot {
        let mut svg =
            format!("<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" role=\"img\">\n");
        writeln!(
            svg,
            "<title>{title}</title>\n{STYLE}\n<rect class=\"panel\" width=\"{width}\" height=\"{height}\" rx=\"8\"/>"
        )
        .unwrap();
        Plot { svg }
    }

    fn text(&mut self, x: f64, y: f64, anchor: &str, class: &str, text: &str) {
        let text = text.replace('&', "&amp;").replace('<', "&lt;");
        writeln!(self.svg, "<text class=\"{class}\" x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{text}</text>")
            .unwrap();
    }

    fn line(&mut self, class: &str, (x1, y1): (f64, f64), (x2, y2): (f64, f64)) {
        writeln!(self.svg, "<line class=\"{class}\" x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\"/>")
            .unwrap();
    }

    fn dot(&mut self, class: &str, (x, y): (f64, f64), filled: bool) {
        let fill = if filled { "" } else { " fill-opacity=\"0\"" };
        writeln!(self.svg, "<circle class=\"{class}\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"4.5\"{fill}/>").unwrap();
    }

    fn bar(&mut self, class: &str, x: f64, y: f64, width: f64, height: f64) {
        writeln!(
            self.svg,
            "<rect class=\"{class}\" x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\"/>"
        )
        .unwrap();
    }

    fn done(mut self) -> String {
        self.svg.push_str("</svg>\n");
        self.svg
    }
}

/// A position on an axis whose marks are powers of ten.
fn logarithmic(value: f64, (least, most): (f64, f64), (from, to): (f64, f64)) -> f64 {
    from + (value.ln() - least.ln()) / (most.ln() - least.ln()) * (to - from)
}

/// Cells of the `index`-th table of a page whose head begins with the given text.
fn cells(page: &str, head: &str, index: usize) -> Vec<Vec<String>> {
    let text = std::fs::read_to_string(repository("book/src").join(page)).unwrap();
    let mut tables = text.split(head).skip(1 + index);
    let body = tables.next().unwrap_or_else(|| panic!("{page} has no such table: {head}"));
    let rows = body.lines().skip(2).take_while(|line| line.starts_with('|'));
    let cells: Vec<Vec<String>> = rows
        .map(|row| row.trim_matches('|').split('|').map(|cell| cell.trim().replace(['*', '`'], "")).collect())
        .collect();
    assert!(cells.len() > 2, "{page}: {head}: {cells:?}");
    cells
}

/// Speeds as measured and as predicted, of `speed.md`.
fn speed() -> String {
    let mut plot = Plot::new(640.0, 470.0, "Predicted against measured tokens per second");
    let (range, across, up) = ((4.0, 16000.0), (70.0, 610.0), (410.0, 30.0));
    let place = |x: f64, y: f64| (logarithmic(x, range, across), logarithmic(y, range, up));
    for mark in [10.0, 100.0, 1000.0, 10000.0] {
        let (x, y) = place(mark, mark);
        plot.line("faint", (x, up.0), (x, up.1));
        plot.line("faint", (across.0, y), (across.1, y));
        plot.text(x, up.0 + 18.0, "middle", "small", &format!("{mark}"));
        plot.text(across.0 - 8.0, y + 4.0, "end", "small", &format!("{mark}"));
    }
    for share in [0.8, 1.0, 1.25] {
        let class = if share == 1.0 { "rule" } else { "faint" };
        plot.line(
            class,
            place(range.0.max(range.0 / share), range.0.max(range.0 * share)),
            place(12800.0, 12800.0 * share),
        );
    }
    for row in cells("speed.md", "| point | measured | predicted | error | role |", 0) {
        let number = |at: usize| row[at].parse::<f64>().unwrap();
        plot.dot(
            if row[4].starts_with("judges") { "b" } else { "a" },
            place(number(1), number(2)),
            !row[4].contains("missed"),
        );
    }
    plot.text(340.0, 450.0, "middle", "", "measured, tokens per second (published by others)");
    plot.text(80.0, 22.0, "start", "", "predicted, tokens per second");
    for (at, class, text) in [(0.0, "a", "calibrates the model"), (20.0, "b", "judges it")] {
        plot.dot(class, (430.0, 350.0 + at), true);
        plot.text(442.0, 354.0 + at, "start", "small", text);
    }
    plot.text(425.0, 394.0, "start", "small", "hollow: more than 25 % off");
    plot.done()
}

/// Divergence by bits of a weight, of `formats.md`.
fn formats() -> String {
    let mut plot = Plot::new(640.0, 430.0, "Divergence by bits of a weight");
    let (least, most, across, up) = (0.001, 1.0, (70.0, 600.0), (370.0, 40.0));
    let place = |bits: f64, kl: f64| {
        (across.0 + (bits - 5.0) / 3.2 * (across.1 - across.0), logarithmic(kl, (least, most), up))
    };
    for (mark, shown) in [(0.001, "0.001"), (0.01, "0.01"), (0.1, "0.1"), (1.0, "1")] {
        let (_, y) = place(5.0, mark);
        plot.line("faint", (across.0, y), (across.1, y));
        plot.text(across.0 - 8.0, y + 4.0, "end", "small", shown);
    }
    for bits in [5.0, 6.0, 7.0, 8.0] {
        plot.text(place(bits, least).0, up.0 + 20.0, "middle", "small", &format!("{bits}"));
    }
    let (_, gate) = place(5.0, 0.02);
    plot.line("rule", (across.0, gate), (across.1, gate));
    plot.text(across.0 + 6.0, gate - 5.0, "start", "small", "the parity gate's limit, 0.02");
    for (index, class, model) in [(0, "a", "Qwen2.5-Coder-0.5B"), (1, "b", "Gemma 3 270M")] {
        for (at, row) in cells("formats.md", "| projections | bits a weight, with the head |", index).iter().enumerate()
        {
            let (bits, kl) = (row[1].parse::<f64>().unwrap(), row[2].parse::<f64>().unwrap());
            let (x, y) = place(bits, kl);
            plot.dot(class, (x, y), true);
            // points of one form lie close together: labels above and below
            let shift = if index == 0 { 4.0 } else { [-8.0, 16.0][at % 2] };
            plot.text(x + 9.0, y + shift, "start", "small", &row[0]);
        }
        plot.dot(class, (95.0, 335.0 + 20.0 * index as f64), true);
        plot.text(107.0, 339.0 + 20.0 * index as f64, "start", "small", model);
    }
    plot.text(340.0, 415.0, "middle", "", "bits a weight, with the LM head");
    plot.text(80.0, 25.0, "start", "", "KL divergence, nats (CPU, f32, 300 tokens, no calibration)");
    plot.done()
}

/// Bandwidth of Neural Engines and of memory, from `chips.yaml`.
fn bandwidth() -> String {
    let text = std::fs::read_to_string(repository("src/advice/tables/chips.yaml")).unwrap();
    let chips: Json = serde_yaml::from_str(&text).unwrap();
    let value = |chip: &Json, key: &str| chip[key]["value"].as_f64();
    let bars: Vec<(String, f64, Option<f64>)> = chips["chips"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|chip| {
            Some((chip["name"].as_str()?.to_owned(), value(chip, "bandwidth_gb_s")?, value(chip, "memory_gb_s")))
        })
        .collect();
    let height = 60.0 + 22.0 * bars.len() as f64;
    let mut plot = Plot::new(640.0, height, "Bandwidth of Neural Engines");
    plot.text(
        20.0,
        26.0,
        "start",
        "",
        "weights read by the Neural Engine, GB/s (published); thin: the chip's memory, to 200",
    );
    for (at, (name, engine, memory)) in bars.iter().enumerate() {
        let y = 44.0 + 22.0 * at as f64;
        let scale = |value: f64| value.min(200.0) / 200.0 * 430.0;
        plot.text(92.0, y + 12.0, "end", "small", name);
        plot.bar("a", 100.0, y, scale(*engine), 11.0);
        if let Some(memory) = memory {
            plot.bar("b", 100.0, y + 13.0, scale(*memory), 2.0);
        }
        plot.text(106.0 + scale(*engine), y + 10.0, "start", "small", &format!("{engine}"));
    }
    plot.done()
}

/// Divergence with nearest codes and with error feedback, of `calibration.md`.
fn feedback() -> String {
    let rows = cells("calibration.md", "| format | nearest | feedback |", 0);
    let height = 70.0 + 42.0 * rows.len() as f64;
    let mut plot = Plot::new(640.0, height, "Divergence with and without error feedback");
    let across = (170.0, 600.0);
    plot.text(
        20.0,
        26.0,
        "start",
        "",
        "KL divergence of the demo model, nats, logarithmic (CPU, f32, 5,053 positions)",
    );
    for (at, row) in rows.iter().enumerate() {
        let y = 46.0 + 42.0 * at as f64;
        plot.text(162.0, y + 18.0, "end", "small", &row[0]);
        for (offset, class, cell) in [(0.0, "b", &row[1]), (16.0, "a", &row[2])] {
            let end = logarithmic(cell.parse().unwrap(), (3e-5, 0.1), across);
            plot.bar(class, across.0, y + offset, end - across.0, 13.0);
            plot.text(end + 6.0, y + offset + 11.0, "start", "small", cell);
        }
    }
    let y = height - 12.0;
    plot.text(across.0, y, "start", "small", "upper: to the nearest; lower: with error feedback (GPTQ)");
    plot.done()
}
