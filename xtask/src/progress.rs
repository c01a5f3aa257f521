//! Prints a line for each step, with the time it took.

use std::fmt::Display;
use std::io::{IsTerminal, Write, stdout};
use std::time::{Duration, Instant};

/// A step in progress. Its line is printed when it is done.
pub(crate) struct Step {
    topic: &'static str,
    what: String,
    started: Instant,
}

impl Step {
    /// Starts the step `what`. On a terminal this is shown at once.
    pub(crate) fn begin(topic: &'static str, what: impl Display) -> Step {
        let what = what.to_string();
        let step = Step { topic, what, started: Instant::now() };
        if stdout().is_terminal() {
            print!("{:>8}  {} ...", step.topic, step.what);
            let _ = stdout().flush();
        }
        step
    }

    /// Prints the line of a step that succeeded.
    pub(crate) fn done(self) {
        let what = self.what.clone();
        self.finish(&what);
    }

    /// As [`Step::done`], with the outcome instead of the step's name.
    pub(crate) fn done_with(self, outcome: impl Display) {
        let outcome = outcome.to_string();
        self.finish(&outcome);
    }

    fn finish(self, text: &str) {
        if stdout().is_terminal() {
            print!("\r\x1b[K");
        }
        println!("{:>8}  {text}  ({})", self.topic, seconds(self.started.elapsed()));
    }
}

/// Prints a line outside of any step.
pub(crate) fn note(topic: &str, what: impl Display) {
    println!("{topic:>8}  {what}");
}

/// A duration for people: `0.3 s`, `12.0 s`, `2 min 5 s`.
pub(crate) fn seconds(duration: Duration) -> String {
    let total = duration.as_secs();
    if total >= 100 {
        format!("{} min {} s", total / 60, total % 60)
    } else {
        format!("{:.1} s", duration.as_secs_f64())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_shown_with_what_precision_a_person_needs() {
        assert_eq!(seconds(Duration::from_millis(340)), "0.3 s");
        assert_eq!(seconds(Duration::from_secs(125)), "2 min 5 s");
    }
}
