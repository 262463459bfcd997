//! Plots as inline SVG: points over layers, with limits. No scripts, fonts or external resources.

use std::fmt::Write;

use super::escape::markup;

const WIDTH: f64 = 460.0;
const HEIGHT: f64 = 200.0;
/// Width reserved for axis labels.
const LEFT: f64 = 62.0;
const BOTTOM: f64 = 26.0;
const TOP: f64 = 26.0;
const RIGHT: f64 = 12.0;

/// Plot over layers.
pub struct Plot<'a> {
    /// Title above the plot.
    pub title: &'a str,
    /// Name and points of each line; x is the layer.
    pub lines: Vec<(&'a str, Vec<(f64, f64)>)>,
    /// Name and value of each limit.
    pub limits: Vec<(&'a str, f64)>,
    /// Whether the vertical axis is logarithmic.
    pub logarithmic: bool,
}

impl Plot<'_> {
    /// Draws the plot; `None` if there are no points.
    pub fn svg(&self) -> Option<String> {
        let points: Vec<(f64, f64)> = self
            .lines
            .iter()
            .flat_map(|(_, points)| points)
            .copied()
            .filter(|(_, y)| self.height(*y).is_some())
            .collect();
        let first = points.first()?;
        let fold = |start: f64, of: fn(f64, f64) -> f64, values: &mut dyn Iterator<Item = f64>| values.fold(start, of);
        let x_range = [
            fold(first.0, f64::min, &mut points.iter().map(|p| p.0)),
            fold(first.0, f64::max, &mut points.iter().map(|p| p.0)),
        ];
        let heights =
            || points.iter().map(|p| p.1).chain(self.limits.iter().map(|l| l.1)).filter_map(|y| self.height(y));
        let start = self.height(first.1)?;
        let y_range = padded([fold(start, f64::min, &mut heights()), fold(start, f64::max, &mut heights())]);
        let x = |value: f64| LEFT + share(value, x_range) * (WIDTH - LEFT - RIGHT);
        let y = |height: f64| HEIGHT - BOTTOM - share(height, y_range) * (HEIGHT - BOTTOM - TOP);
        let mut svg = format!(
            "<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{0}\">\n<text class=\"title\" x=\"{LEFT}\" y=\"15\">{0}</text>\n",
            markup(self.title)
        );
        for step in 0..=3 {
            let height = y_range[0] + (y_range[1] - y_range[0]) * f64::from(step) / 3.0;
            let value = if self.logarithmic { 10f64.powf(height) } else { height };
            // writing to a string doesn't fail
            let _ = writeln!(
                svg,
                "<line class=\"grid\" x1=\"{LEFT}\" x2=\"{right:.1}\" y1=\"{at:.1}\" y2=\"{at:.1}\"/>\
                 <text class=\"tick\" x=\"{:.1}\" y=\"{:.1}\">{}</text>",
                LEFT - 6.0,
                y(height) + 4.0,
                number(value),
                right = WIDTH - RIGHT,
                at = y(height),
            );
        }
        for at in [x_range[0], x_range[1]].iter().take(if x_range[0] == x_range[1] { 1 } else { 2 }) {
            let _ = writeln!(
                svg,
                "<text class=\"label\" x=\"{:.1}\" y=\"{:.1}\">{at}</text>",
                x(*at),
                HEIGHT - BOTTOM + 16.0
            );
        }
        for (name, limit) in &self.limits {
            let Some(height) = self.height(*limit) else { continue };
            let _ = writeln!(
                svg,
                "<line class=\"limit\" x1=\"{LEFT}\" x2=\"{0:.1}\" y1=\"{1:.1}\" y2=\"{1:.1}\"/><text class=\"limit\" x=\"{0:.1}\" y=\"{2:.1}\">{3}</text>",
                WIDTH - RIGHT,
                y(height),
                y(height) - 4.0,
                markup(name),
            );
        }
        // a single line is described by the title
        if self.lines.len() > 1 {
            let mut right = WIDTH - RIGHT;
            for (index, (name, _)) in self.lines.iter().enumerate().rev() {
                let _ =
                    writeln!(svg, "<text class=\"name line{index}\" x=\"{right:.1}\" y=\"15\">{}</text>", markup(name));
                right -= 7.0 * name.chars().count() as f64 + 8.0;
            }
        }
        for (index, (name, points)) in self.lines.iter().enumerate() {
            let shown: Vec<(f64, f64)> =
                points.iter().filter_map(|(at, value)| Some((x(*at), y(self.height(*value)?)))).collect();
            let path: Vec<String> = shown.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
            let _ = writeln!(svg, "<polyline class=\"line{index}\" points=\"{}\"/>", path.join(" "));
            for ((cx, cy), (at, value)) in shown.iter().zip(points.iter().filter(|p| self.height(p.1).is_some())) {
                let _ = writeln!(
                    svg,
                    "<circle class=\"line{index}\" cx=\"{cx:.1}\" cy=\"{cy:.1}\" r=\"3\"><title>{} {at}: {}</title></circle>",
                    markup(name),
                    number(*value),
                );
            }
        }
        svg.push_str("</svg>\n");
        Some(svg)
    }

    /// Position on the vertical axis; `None` for NaN and for values <= 0 on a logarithmic axis.
    fn height(&self, value: f64) -> Option<f64> {
        let height = if self.logarithmic { value.log10() } else { value };
        (value.is_finite() && height.is_finite()).then_some(height)
    }
}

fn share(value: f64, range: [f64; 2]) -> f64 {
    if range[1] == range[0] { 0.5 } else { (value - range[0]) / (range[1] - range[0]) }
}

/// Extends a range at both ends, also if it is empty.
fn padded([low, high]: [f64; 2]) -> [f64; 2] {
    let room = if high > low { (high - low) * 0.08 } else { high.abs().max(1.0) * 0.1 };
    [low - room, high + room]
}

/// Short form of a number.
fn number(value: f64) -> String {
    let magnitude = value.abs();
    if value == 0.0 {
        "0".into()
    } else if (0.01..1e5).contains(&magnitude) {
        let digits = if magnitude >= 100.0 { 0 } else { 4 };
        let text = format!("{value:.digits$}");
        if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
    } else {
        format!("{value:.1e}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn points_and_limits_are_where_they_belong() {
        let plot = Plot {
            title: "a < b",
            lines: vec![("layer", vec![(0.0, 1.0), (1.0, 100.0), (2.0, f64::NAN), (3.0, 0.0)])],
            limits: vec![("fp16", 65504.0)],
            logarithmic: true,
        };
        let svg = plot.svg().unwrap();
        // what has no logarithm isn't drawn
        assert_eq!(svg.matches("<circle").count(), 2);
        assert!(svg.contains("a &lt; b") && svg.contains("<title>layer 1: 100</title>"), "{svg}");
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        // several lines have their names beside the title
        let lines = vec![("f32", vec![(0.0, 1.0)]), ("f16", vec![(0.0, 2.0)])];
        let two = Plot { title: "t", lines, limits: Vec::new(), logarithmic: false }.svg().unwrap();
        assert!(two.contains("class=\"name line0\"") && two.contains(">f16</text>"), "{two}");
        assert!(!svg.contains("class=\"name"), "{svg}");
        assert!(Plot { lines: vec![("x", vec![])], ..plot }.svg().is_none());
    }

    #[test]
    fn numbers_are_short() {
        assert_eq!(
            [0.0, 1.0, 0.25, 65504.0, 1e-7, 123456.0].map(number),
            ["0", "1", "0.25", "65504", "1.0e-7", "1.2e5"]
        );
    }
}
