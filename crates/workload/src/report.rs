//! A report page: one HTML file that contains its styles and plots and needs no network access.

use std::fmt::Write;

use crate::stats::Interval;

/// A page under construction.
pub struct Page {
    title: String,
    body: String,
}

/// One bar of a plot.
#[derive(Clone, PartialEq, Debug)]
pub struct Bar {
    /// Its label.
    pub label: String,
    /// Its length, in the unit of the plot.
    pub value: f64,
    /// The text at its end.
    pub text: String,
    /// Ends of an interval, drawn as a whisker.
    pub range: Option<(f64, f64)>,
    /// The baseline is drawn in another colour.
    pub baseline: bool,
}

impl Bar {
    /// A mean, with its interval where there is one.
    pub fn of(label: impl Into<String>, mean: &Interval, text: String) -> Bar {
        let range = (mean.n > 1).then_some((mean.low, mean.high));
        Bar { label: label.into(), value: mean.mean, text, range, baseline: false }
    }
}

/// One curve of a line plot. Coordinates are fractions of the plot, from the left and from below.
#[derive(Clone, PartialEq, Default, Debug)]
pub struct Curve {
    /// What it stands for.
    pub label: String,
    /// From left to right.
    pub points: Vec<(f64, f64)>,
    /// Ends of an interval at each point, drawn as a whisker; none, or one a point.
    pub whiskers: Vec<(f64, f64)>,
    /// A dashed line of the same colour.
    pub fit: Vec<(f64, f64)>,
}

/// Marks of one colour in a plot: each has a left end, a height and a width, as fractions of the plot.
#[derive(Clone, PartialEq, Debug)]
pub struct Marks {
    /// What they stand for.
    pub label: String,
    /// Left end, height, width; one narrower than can be seen is drawn as a point.
    pub at: Vec<(f64, f64, f64)>,
}

/// Colours of lines and marks, used cyclically.
const COLOURS: usize = 8;

const STYLE: &str = "\
:root{color-scheme:light dark;--ink:#1b1f24;--quiet:#5c6670;--paper:#fff;--line:#d5dae0;--bar:#2f6fb2;--base:#9aa4af}\
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ed;--quiet:#9aa4af;--paper:#15181c;--line:#353b43;--bar:#6aa5e0;--base:#6b747e}}\
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:var(--ink);background:var(--paper)}\
h1{font-size:1.6rem}h2{font-size:1.2rem;margin-top:2.2rem}p.note{color:var(--quiet)}\
table{border-collapse:collapse;font-size:.92rem;font-variant-numeric:tabular-nums}\
div.wide{overflow-x:auto}th,td{padding:.25rem .7rem;border-bottom:1px solid var(--line);text-align:right}\
th:first-child,td:first-child{text-align:left}td:not(:first-child){white-space:nowrap}svg{width:100%;height:auto;margin:.3rem 0}\
svg text{fill:var(--ink);font:13px system-ui,sans-serif}svg .bar{fill:var(--bar)}svg .base{fill:var(--base)}\
svg line{stroke:var(--ink);stroke-width:1.5}\
svg polyline{fill:none;stroke-width:2}svg .fit{stroke-dasharray:4 4;stroke-width:1.2}svg .grid{stroke:var(--line);stroke-width:1}\
svg path{fill:none;stroke-width:2.4}\
svg .c0{stroke:#2f6fb2}svg .c1{stroke:#c4572b}svg .c2{stroke:#3f8f4f}svg .c3{stroke:#8757a6}\
svg .c4{stroke:#b58900}svg .c5{stroke:#1f9aa3}svg .c6{stroke:#c2448c}svg .c7{stroke:#7a6a58}";

/// Text escaped for HTML.
fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            _ => out.push(c),
        }
    }
    out
}

// The plot's position within its picture, in the picture's units.
const LEFT: f64 = 90.0;
const TOP: f64 = 10.0;
const WIDTH: f64 = 640.0;
const FRAME_HEIGHT: f64 = 380.0;

/// The beginning of a plot: its picture, and its marks at the bottom and at the left.
fn frame(what: &str, height: f64, x_marks: &[(f64, String)], y_marks: &[(f64, String)]) -> String {
    let (x, y) = (|part: f64| LEFT + part * WIDTH, |part: f64| TOP + (1.0 - part.clamp(0.0, 1.0)) * height);
    let mut svg = format!(
        "<svg viewBox=\"0 0 {} {}\" role=\"img\" aria-label=\"{}\">\n",
        LEFT + WIDTH + 195.0,
        TOP + height + 40.0,
        escape(what)
    );
    for (part, text) in x_marks {
        let (at, bottom) = (x(*part), TOP + height);
        svg += &format!(
            "<line class=\"grid\" x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{TOP}\" y2=\"{bottom}\"/>\
             <text x=\"{at:.1}\" y=\"{}\" text-anchor=\"middle\">{}</text>\n",
            bottom + 20.0,
            escape(text)
        );
    }
    for (part, text) in y_marks {
        let at = y(*part);
        svg += &format!(
            "<line class=\"grid\" x1=\"{LEFT}\" x2=\"{}\" y1=\"{at:.1}\" y2=\"{at:.1}\"/>\
             <text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>\n",
            LEFT + WIDTH,
            LEFT - 8.0,
            at + 4.5,
            escape(text)
        );
    }
    svg
}

/// The name of the nth curve or colour, at the right.
fn legend(nth: usize, label: &str) -> String {
    let (colour, from, at) = (nth % COLOURS, LEFT + WIDTH + 14.0, TOP + 20.0 + 24.0 * nth as f64);
    format!(
        "<line class=\"c{colour}\" x1=\"{from}\" x2=\"{}\" y1=\"{at}\" y2=\"{at}\"/>\
         <text x=\"{}\" y=\"{}\">{}</text>\n",
        from + 22.0,
        from + 28.0,
        at + 4.5,
        escape(label)
    )
}

impl Page {
    /// An empty page.
    pub fn new(title: &str) -> Page {
        Page { title: title.into(), body: format!("<h1>{}</h1>\n", escape(title)) }
    }

    /// A heading.
    pub fn heading(&mut self, text: &str) -> &mut Page {
        self.push(format_args!("<h2>{}</h2>\n", escape(text)))
    }

    /// A paragraph.
    pub fn text(&mut self, text: &str) -> &mut Page {
        self.push(format_args!("<p>{}</p>\n", escape(text)))
    }

    /// A paragraph in a quieter colour.
    pub fn note(&mut self, text: &str) -> &mut Page {
        self.push(format_args!("<p class=\"note\">{}</p>\n", escape(text)))
    }

    /// A list.
    pub fn list<T: AsRef<str>>(&mut self, items: &[T]) -> &mut Page {
        let items: String = items.iter().map(|i| format!("<li>{}</li>", escape(i.as_ref()))).collect();
        self.push(format_args!("<ul>{items}</ul>\n"))
    }

    /// A table; its first column is text.
    pub fn table<T: AsRef<str>>(&mut self, head: &[T], rows: &[Vec<String>]) -> &mut Page {
        let cells = |tag: &str, cells: &mut dyn Iterator<Item = &str>| {
            let row: String = cells.map(|c| format!("<{tag}>{}</{tag}>", escape(c))).collect();
            format!("<tr>{row}</tr>\n")
        };
        let head = cells("th", &mut head.iter().map(AsRef::as_ref));
        let rows: String = rows.iter().map(|r| cells("td", &mut r.iter().map(String::as_str))).collect();
        self.push(format_args!("<div class=\"wide\"><table>\n{head}{rows}</table></div>\n"))
    }

    /// A plot of horizontal bars from zero; `what` is the description for screen readers.
    pub fn bars(&mut self, what: &str, bars: &[Bar]) -> &mut Page {
        const LABEL: f64 = 210.0;
        const WIDTH: f64 = 470.0;
        const TEXT: f64 = 220.0;
        const ROW: f64 = 26.0;
        let top = bars.iter().flat_map(|b| [b.value, b.range.map_or(0.0, |r| r.1)]).fold(0.0, f64::max);
        let scale = if top > 0.0 { WIDTH / top } else { 0.0 };
        let height = ROW * bars.len() as f64;
        let mut svg = format!(
            "<svg viewBox=\"0 0 {} {height}\" role=\"img\" aria-label=\"{}\">\n",
            LABEL + WIDTH + TEXT,
            escape(what)
        );
        for (i, bar) in bars.iter().enumerate() {
            let (y, middle) = (ROW * i as f64, ROW * (i as f64 + 0.5));
            let len = (bar.value * scale).max(0.0);
            let class = if bar.baseline { "base" } else { "bar" };
            let mut end = len;
            svg += &format!(
                "<text x=\"{}\" y=\"{}\" text-anchor=\"end\">{}</text>\
                 <rect class=\"{class}\" x=\"{LABEL}\" y=\"{}\" width=\"{len:.1}\" height=\"{}\" rx=\"2\"/>",
                LABEL - 8.0,
                middle + 4.5,
                escape(&bar.label),
                y + 4.0,
                ROW - 8.0,
            );
            if let Some((low, high)) = bar.range {
                let (low, high) = (LABEL + low.max(0.0) * scale, LABEL + high.max(0.0) * scale);
                end = end.max(high - LABEL);
                svg += &format!("<line x1=\"{low:.1}\" x2=\"{high:.1}\" y1=\"{middle}\" y2=\"{middle}\"/>");
            }
            svg +=
                &format!("<text x=\"{:.1}\" y=\"{}\">{}</text>\n", LABEL + end + 8.0, middle + 4.5, escape(&bar.text));
        }
        self.push(format_args!("{svg}</svg>\n"))
    }

    /// A line plot with labels; `what` is the description for screen readers. Marks are positions and texts.
    pub fn lines(
        &mut self,
        what: &str,
        lines: &[Curve],
        x_marks: &[(f64, String)],
        y_marks: &[(f64, String)],
    ) -> &mut Page {
        let mut svg = frame(what, FRAME_HEIGHT, x_marks, y_marks);
        let (x, y) = (|part: f64| LEFT + part * WIDTH, |part: f64| TOP + (1.0 - part.clamp(0.0, 1.0)) * FRAME_HEIGHT);
        for (nth, line) in lines.iter().enumerate() {
            let colour = nth % COLOURS;
            let path = |points: &[(f64, f64)]| {
                points.iter().map(|(px, py)| format!("{:.1},{:.1} ", x(*px), y(*py))).collect::<String>()
            };
            svg += &format!("<polyline class=\"c{colour} fit\" points=\"{}\"/>", path(&line.fit));
            svg += &format!("<polyline class=\"c{colour}\" points=\"{}\"/>", path(&line.points));
            for ((px, _), (low, high)) in line.points.iter().zip(&line.whiskers) {
                let (at, low, high) = (x(*px), y(*low), y(*high));
                svg += &format!(
                    "<line class=\"c{colour}\" x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{low:.1}\" y2=\"{high:.1}\"/>"
                );
            }
            svg += &legend(nth, &line.label);
        }
        self.push(format_args!("{svg}</svg>\n"))
    }

    /// A plot of marks, one colour per group; `what` is the description for screen readers.
    pub fn places(
        &mut self,
        what: &str,
        groups: &[Marks],
        x_marks: &[(f64, String)],
        y_marks: &[(f64, String)],
    ) -> &mut Page {
        /// Narrower marks are widened to this, of the plot's units.
        const SEEN: f64 = 1.2;
        const HEIGHT: f64 = 240.0;
        let mut svg = frame(what, HEIGHT, x_marks, y_marks);
        for (nth, group) in groups.iter().enumerate() {
            // One path for all of a colour: a picture has thousands of marks.
            let mut path = String::new();
            for (left, height, width) in &group.at {
                let (x, y) = (LEFT + left * WIDTH, TOP + (1.0 - height.clamp(0.0, 1.0)) * HEIGHT);
                // Writing to a string cannot fail.
                _ = write!(path, "M{x:.1} {y:.1}h{:.1}", (width * WIDTH).max(SEEN));
            }
            svg += &format!("<path class=\"c{}\" d=\"{path}\"/>{}", nth % COLOURS, legend(nth, &group.label));
        }
        self.push(format_args!("{svg}</svg>\n"))
    }

    fn push(&mut self, text: std::fmt::Arguments<'_>) -> &mut Page {
        // Writing to a string cannot fail.
        _ = self.body.write_fmt(text);
        self
    }

    /// The whole page.
    pub fn html(&self) -> String {
        format!(
            "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
             <title>{}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{}</body>\n</html>\n",
            escape(&self.title),
            self.body
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_holds_its_data_and_refers_to_nothing_outside() {
        let mut page = Page::new("Results <of> today");
        page.heading("Strided & small").text("Times on the modelled disk.").note("quiet").list(&["one", "two"]);
        page.table(&["policy", "time"], &[vec!["mlf".into(), "3.1 s".into()]]);
        let bar = |label: &str, value, range| Bar {
            label: label.into(),
            value,
            text: format!("{value} s"),
            range,
            baseline: label == "none",
        };
        page.bars("times", &[bar("none", 6.0, Some((5.5, 6.5))), bar("mlf", 3.0, None)]);
        let html = page.html();
        for wanted in
            ["Results &lt;of&gt; today", "Strided &amp; small", "modelled disk", "<td>3.1 s</td>", "6 s", "<line"]
        {
            assert!(html.contains(wanted), "{wanted} is missing");
        }
        for foreign in ["http:", "https:", "src=", "href=", "@import", "<script", "url("] {
            assert!(!html.contains(foreign), "{foreign} refers outside");
        }
        assert_eq!(html.matches("<rect").count(), 2);
        assert_eq!(html.matches("class=\"base\"").count(), 1);
    }

    #[test]
    fn marks_of_a_colour_are_one_path_within_the_frame() {
        let mut page = Page::new("x");
        let marks = |label: &str, at: &[(f64, f64, f64)]| Marks { label: label.into(), at: at.to_vec() };
        let groups = [marks("<a>", &[(0.0, 0.0, 0.5), (0.5, 1.0, 0.0)]), marks("b", &[])];
        let html = page.places("who", &groups, &[(0.0, "0".into())], &[]).html();
        assert_eq!(html.matches("<path").count(), 2);
        let bottom = TOP + 240.0;
        assert!(html.contains(&format!("d=\"M90.0 {bottom:.1}h320.0M410.0 10.0h1.2\"")), "{html}");
        assert!(html.contains("&lt;a&gt;"), "{html}");
    }

    #[test]
    fn an_empty_plot_is_no_error() {
        assert!(Page::new("x").bars("nothing", &[]).html().contains("<svg"));
    }
}
