//! Hardware of older PCs that Linux does not need with ACPI, the ECAM and KVM's clock, and the parts of it that a
//! kernel needs according to its command line.
//!
//! The hardware is left out if the kernel does not need it, because Linux would use it: the ports of configuration
//! space cost two exits per access, and the timer 5 ms at boot.

use serde::{Deserialize, Serialize};

/// Hardware of older PCs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LegacyHardware {
    /// The ports of configuration space, CF8h and CFCh.
    pub config_ports: bool,
    /// The table of the MultiProcessor Specification.
    pub mp_table: bool,
    /// The ACPI power management timer.
    pub pm_timer: bool,
    /// The real-time clock at the ports 70h and 71h.
    pub clock: bool,
}

impl LegacyHardware {
    /// None of it.
    pub const NONE: Self = Self { config_ports: false, mp_table: false, pm_timer: false, clock: false };
    /// All of it: for firmware, and for unknown kernels.
    pub const ALL: Self = Self { config_ports: true, mp_table: true, pm_timer: true, clock: true };

    /// The hardware that Linux needs with this command line.
    ///
    /// Words are parsed as by Linux: separated by white space outside of quotation marks, until the word `--`, with `-`
    /// and `_` as the same character in a name. A built-in command line is not known here.
    pub fn of_linux(command_line: &str) -> Self {
        let (mut is_acpi_off, mut has_acpi_routing, mut has_ecam, mut has_kvm_clock) = (false, true, true, true);
        for (name, value) in words(command_line) {
            match (name.as_str(), value) {
                // The last of both counts.
                ("acpi", Some("off")) => is_acpi_off = true,
                ("acpi", Some("force")) => is_acpi_off = false,
                ("acpi", Some("noirq")) => has_acpi_routing = false,
                ("pci", Some(list)) => {
                    for word in list.split(',') {
                        // Each of these stays in force, whatever follows.
                        has_ecam &= !matches!(word, "nommconf" | "conf1" | "conf2" | "bios");
                        has_acpi_routing &= word != "noacpi";
                    }
                }
                // With any value, or none.
                ("no-kvmclock" | "nopv", _) => has_kvm_clock = false,
                _ => {}
            }
        }
        let has_acpi = !is_acpi_off && has_acpi_routing;
        Self {
            config_ports: !has_acpi || !has_ecam,
            mp_table: !has_acpi,
            pm_timer: !has_kvm_clock,
            clock: !has_acpi || !has_kvm_clock,
        }
    }
}

/// The names and values of a command line, up to the word `--`. Names have `-` replaced by `_`.
fn words(command_line: &str) -> impl Iterator<Item = (String, Option<&str>)> {
    let mut is_quoted = false;
    let is_separator = move |character: char| {
        is_quoted ^= character == '"';
        !is_quoted && matches!(character, ' ' | '\t'..='\r')
    };
    let words = command_line.split(is_separator).filter(|word| !word.is_empty()).take_while(|word| *word != "--");
    words.map(|word| {
        let word = word.trim_matches('"');
        let (name, value) = word.split_once('=').map_or((word, None), |(name, value)| (name, Some(value)));
        (name.replace('_', "-"), value.map(|value| value.trim_matches('"')))
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Asserts the hardware that a command line needs: ports of configuration space, MP table, timer and clock.
    #[track_caller]
    fn needs(command_line: &str, [config_ports, mp_table, pm_timer, clock]: [u8; 4]) {
        let is = |number| number == 1;
        let expected = LegacyHardware {
            config_ports: is(config_ports),
            mp_table: is(mp_table),
            pm_timer: is(pm_timer),
            clock: is(clock),
        };
        assert_eq!(LegacyHardware::of_linux(command_line), expected, "{command_line}");
    }

    #[test]
    fn a_common_command_line_needs_nothing() {
        for command_line in [
            "",
            "console=ttyS0 root=/dev/vda1 rw quiet",
            "noapic nosmp nolapic pci=realloc,nocrs acpi=strict acpi=rsdt clocksource=tsc no-kvmclock-vsyscall",
            "acpi=offline xacpi=off acpi pci pci=off,nommconfig pci=nomsi nopvspin acpi.off=1 apci=off",
        ] {
            needs(command_line, [0, 0, 0, 0]);
        }
    }

    #[test]
    fn each_word_needs_what_linux_has_instead() {
        for (command_line, expected) in [
            ("quiet acpi=off", [1, 1, 0, 1]),
            ("acpi=noirq", [1, 1, 0, 1]),
            ("pci=noacpi", [1, 1, 0, 1]),
            ("pci=nommconf", [1, 0, 0, 0]),
            ("pci=nommconf,realloc", [1, 0, 0, 0]),
            ("pci=realloc,nommconf pci=nocrs", [1, 0, 0, 0]),
            ("pci=conf1", [1, 0, 0, 0]),
            ("no-kvmclock", [0, 0, 1, 1]),
            ("no_kvmclock", [0, 0, 1, 1]),
            ("nopv quiet", [0, 0, 1, 1]),
            ("nopv=1", [0, 0, 1, 1]),
            ("acpi=off nopv", [1, 1, 1, 1]),
            ("\tacpi=off\nnopv\r", [1, 1, 1, 1]),
        ] {
            needs(command_line, expected);
        }
    }

    #[test]
    fn the_last_word_about_acpi_counts() {
        needs("acpi=off acpi=force", [0, 0, 0, 0]);
        needs("acpi=force acpi=off", [1, 1, 0, 1]);
        needs("acpi=off acpi=strict", [1, 1, 0, 1]);
        needs("acpi=noirq acpi=force", [1, 1, 0, 1]);
    }

    #[test]
    fn words_for_init_do_not_count() {
        needs("quiet -- acpi=off nopv pci=nommconf", [0, 0, 0, 0]);
        needs("nopv -- acpi=off", [0, 0, 1, 1]);
        needs("--acpi=off --nopv", [0, 0, 0, 0]);
    }

    #[test]
    fn quotation_marks_hold_a_word_together() {
        needs("dyndbg=\"file a.c +p; acpi=off nopv\"", [0, 0, 0, 0]);
        needs("acpi=\"off\" \"pci=nommconf\"", [1, 1, 0, 1]);
        needs("a=\"-- b\" nopv", [0, 0, 1, 1]);
        needs("a=\"open nopv", [0, 0, 0, 0]);
    }

    proptest! {
        #[test]
        fn no_command_line_panics(text: String, words in prop::collection::vec("[ a-z=_,\"-]{0,9}", 0..9)) {
            LegacyHardware::of_linux(&text);
            LegacyHardware::of_linux(&words.concat());
        }
    }
}
