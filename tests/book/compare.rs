//! Whether a page shows what a program printed: the same words, and numbers as equal as other processors compute them.

/// A piece of a line.
#[derive(Debug, PartialEq)]
enum Piece<'a> {
    /// A number with a fraction or an exponent: a measured or computed one.
    Decimal {
        value: f64,
        /// Value of one unit of its last digit.
        last: f64,
    },
    /// Anything else: a word, a whole number, a mark.
    Text(&'a str),
}

impl Piece<'_> {
    fn is_number(&self) -> bool {
        match self {
            Piece::Decimal { .. } => true,
            Piece::Text(text) => text.starts_with(|c: char| c.is_ascii_digit()),
        }
    }
}

fn pieces(line: &str) -> Vec<Piece<'_>> {
    let mut pieces = Vec::new();
    for word in line.split_whitespace() {
        let mut rest = word;
        while !rest.is_empty() {
            let digit = rest.starts_with(|c: char| c.is_ascii_digit());
            let mut end =
                rest.find(|c: char| c.is_ascii_digit() != digit && !(digit && c == '.')).unwrap_or(rest.len());
            if digit {
                let exponent = rest[end..].strip_prefix('e').map(|rest| rest.strip_prefix('-').unwrap_or(rest));
                let digits =
                    exponent.map_or(0, |rest| rest.len() - rest.trim_start_matches(|c: char| c.is_ascii_digit()).len());
                if let Some(exponent) = exponent.filter(|_| digits > 0) {
                    end = rest.len() - exponent.len() + digits;
                }
                // a mark that ends a sentence is no fraction
                end = rest[..end].trim_end_matches('.').len();
            }
            let (piece, after) = rest.split_at(end);
            let decimal = piece.parse().ok().filter(|_| digit && piece.contains(['.', 'e']));
            let (digits, exponent) = piece.split_once('e').unwrap_or((piece, "0"));
            let places = digits.split_once('.').map_or(0, |(_, places)| places.len() as i32);
            let last = 10f64.powi(exponent.parse().unwrap_or(0) - places);
            pieces.push(decimal.map_or(Piece::Text(piece), |value| Piece::Decimal { value, last }));
            rest = after;
        }
    }
    pieces
}

/// Whether two numbers may stand for each other: by a tenth, cosines by half of what they lack of 1, all by three of
/// their last digit. Sums in another order, which other processors take, change that much of a rounded result.
fn near(a: f64, b: f64, last: f64) -> bool {
    let room = if (0.5..=1.5).contains(&a) { 0.5 * (1.0 - a).abs() } else { 0.1 * a.abs() };
    (a - b).abs() <= room + 3.01 * last
}

/// Whether two texts have the same lines but for spaces and for decimals that are [`near`] each other. Seconds, speeds
/// (`N per second`) and memory of the process are whatever they are.
pub fn same(shown: &str, printed: &str) -> bool {
    let (mut shown, mut printed) = (shown.lines(), printed.lines());
    loop {
        let (shown, printed) = match (shown.next(), printed.next()) {
            (Some(shown), Some(printed)) => (pieces(shown), pieces(printed)),
            (None, None) => return true,
            _ => return false,
        };
        let word = |at: usize| match shown.get(at) {
            Some(Piece::Text(word)) => word.trim_end_matches([',', ';']),
            _ => "",
        };
        let timed = |at: usize| match [word(at + 1), word(at + 2), word(at + 3)] {
            ["s" | "ms", ..] | ["per", "second", _] | ["MB", "of", "memory"] => shown[at].is_number(),
            _ => false,
        };
        let equal = |(at, (a, b)): (usize, (&Piece<'_>, &Piece<'_>))| match (a, b) {
            (a, b) if a == b || timed(at) && b.is_number() => true,
            (Piece::Decimal { value: a, last }, Piece::Decimal { value: b, .. }) => near(*a, *b, *last),
            _ => false,
        };
        if shown.len() != printed.len() || !shown.iter().zip(&printed).enumerate().all(equal) {
            return false;
        }
    }
}

#[test]
fn words_and_whole_numbers_are_compared_exactly() {
    assert!(same("4 packages:  3.7 MB", "4 packages: 3.71 MB\n"));
    assert!(!same("4 packages: 3.7 MB", "5 packages: 3.7 MB"));
    assert!(!same("4 packages: 3.7 MB", "4 packages: 4.7 MB"));
    assert!(!same("one line", "one line\nand another"));
}

#[test]
fn cosines_are_compared_by_what_they_lack_of_one() {
    assert!(same("cosine 0.999635", "cosine 0.999631"));
    assert!(same("-0.05 %", "-0.04 %"));
    assert!(!same("cosine 0.999635", "cosine 0.995"));
    assert!(same("T = 1: 1.8e-1.", "T = 1: 1.9e-1."));
    assert!(!same("1.8e-1", "1.8e-2"));
}

#[test]
fn times_and_memory_of_the_process_are_not_compared() {
    assert!(same("5.4 MB; 0.4 s, 46.0 MB of memory", "5.4 MB; 1.9 s, 52.5 MB of memory"));
    assert!(same("at 16.2 per second, after 309 ms", "at 284.1 per second, after 12.5 ms"));
    assert!(!same("5.4 MB; 0.4 s", "9.4 MB; 0.4 s"));
}
