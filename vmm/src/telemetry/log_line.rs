//! Lines of the log about functions, devices and the VM. Each begins with its subject, so that grep finds a VF: `pf0v3`
//! is VF 3 of `pf0`, as in the names of its tap and threads.

use std::fmt::Write as _;

/// Events that have a line of their own, with more details, or that say nothing to a reader of the log.
const LOGGED_ELSEWHERE: [&str; 6] = [
    "backend-lost",
    "backend-restored",
    "migration-failed",
    "migration-memory-iteration",
    "migration-receive-failed",
    "migration-unknown",
];

/// Name of VF `index` of the device `id`, or of that device.
pub(crate) fn subject(id: &str, index: Option<&str>) -> String {
    index.map_or_else(|| id.to_string(), |index| format!("{id}v{index}"))
}

/// Logs an event with its properties, at the level of `-v`. It is about the program if `is_vmm` and it names no device.
pub(super) fn log_event(is_vmm: bool, event: &str, properties: &[(&'static str, &str)]) {
    if log::log_enabled!(log::Level::Info) && !LOGGED_ELSEWHERE.contains(&event) {
        log::info!("{}", of_event(is_vmm, event, properties));
    }
}

fn of_event(is_vmm: bool, event: &str, properties: &[(&'static str, &str)]) -> String {
    let value = |key| properties.iter().find(|(name, _)| *name == key).map(|(_, text)| *text);
    let mut line = match value("id") {
        Some(id) => subject(id, value("index")),
        None if is_vmm => "vmm".to_string(),
        None => "vm".to_string(),
    };
    // Writing to a string does not fail.
    let _ = write!(line, ": {event}");
    for (name, value) in properties.iter().filter(|(name, _)| !["id", "index"].contains(name)) {
        let is_word = value.chars().all(|c| c.is_ascii_alphanumeric() || "_-.:/".contains(c));
        let _ = if is_word { write!(line, " {name}={value}") } else { write!(line, " {name}={value:?}") };
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_begins_with_the_function_that_it_is_about() {
        let line = |is_vmm, properties: &[(&'static str, &str)]| of_event(is_vmm, "event", properties);
        assert_eq!(line(true, &[]), "vmm: event");
        assert_eq!(line(false, &[]), "vm: event");
        assert_eq!(line(false, &[("id", "pf0")]), "pf0: event");
        let of_vf = [("id", "pf0"), ("index", "3"), ("by", "driver"), ("changed", "vlan 0 -> 100\n")];
        assert_eq!(line(false, &of_vf), "pf0v3: event by=driver changed=\"vlan 0 -> 100\\n\"");
    }
}
