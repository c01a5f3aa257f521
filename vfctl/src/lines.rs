//! Lines from a stream of bytes, whose lengths are bounded.

/// Collects bytes, and returns lines of at most `most` bytes without their newlines. Longer lines are left out.
#[derive(Debug)]
pub(crate) struct Lines {
    bytes: Vec<u8>,
    most: usize,
    /// True until the newline of a line that is too long.
    skips: bool,
}

impl Lines {
    /// Creates it for lines of at most `most` bytes, without their newlines.
    pub(crate) fn new(most: usize) -> Self {
        Self { bytes: Vec::new(), most, skips: false }
    }

    /// Adds bytes that were read. The caller takes all lines before it adds more.
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// Takes the next complete line.
    pub(crate) fn next(&mut self) -> Option<Vec<u8>> {
        loop {
            let Some(end) = self.bytes.iter().position(|byte| *byte == b'\n') else {
                if self.bytes.len() > self.most {
                    self.bytes.clear();
                    self.skips = true;
                }
                return None;
            };
            let mut line: Vec<u8> = self.bytes.drain(..=end).collect();
            line.pop();
            if !std::mem::take(&mut self.skips) && line.len() <= self.most {
                return Some(line);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(lines: &mut Lines, bytes: &[u8]) -> Vec<String> {
        lines.push(bytes);
        std::iter::from_fn(|| lines.next()).map(|line| String::from_utf8(line).unwrap()).collect()
    }

    #[test]
    fn a_line_is_complete_at_its_newline() {
        let mut lines = Lines::new(8);
        assert_eq!(all(&mut lines, b"ab"), [""; 0]);
        assert_eq!(all(&mut lines, b"c\nd\n\ne"), ["abc", "d", ""]);
        assert_eq!(all(&mut lines, b"\n"), ["e"]);
    }

    #[test]
    fn a_line_that_is_too_long_is_left_out_as_a_whole() {
        let mut lines = Lines::new(4);
        assert_eq!(all(&mut lines, b"1234\n12345\nab\n"), ["1234", "ab"]);
        assert_eq!(all(&mut lines, b"123456"), [""; 0]);
        assert!(lines.bytes.is_empty());
        assert_eq!(all(&mut lines, b"78\ncd\n"), ["cd"]);
    }
}
