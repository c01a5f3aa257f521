//! The table of PFs and VFs for people, in at most 100 columns, with notes below it.

use vm_api::config::Mirror;
use vm_api::info::{StoppedBy, VmInfo};

use super::indices::Indices;
use super::vfs::{Row, VfNumbers};

/// Columns that the table has room for.
const WIDTH: usize = 100;
/// Least width of the column of backends, which is cut to make room.
const LEAST: usize = 7;
const HEAD: [&str; 13] =
    ["PF", "VF", "ADDRESS", "STATE", "MAC", "BACKEND", "LINK", "VLAN", "FLAGS", "RATE", "RX", "TX", "DROPS"];
/// Most characters of a list of VLANs; JSON has all.
const LONGEST_VLAN: usize = 7;
/// Column of the backend.
const BACKEND: usize = 5;

/// Choice of rows: those of one PF, or some of its VFs.
#[derive(Debug, Default)]
pub(crate) struct Choice {
    /// Id of the PF; `None` for all.
    pub pf: Option<String>,
    /// The VFs of the PF; `None` for all with the PF itself.
    pub indices: Option<Indices>,
}

impl Choice {
    /// True if the row is one of those chosen.
    pub(crate) fn has(&self, row: &Row) -> bool {
        let is_of = |indices: &Indices| row.index.is_some_and(|index| indices.has(index));
        self.pf.as_ref().is_none_or(|pf| *pf == row.pf) && self.indices.as_ref().is_none_or(is_of)
    }

    /// The reason why no row is chosen, in one line.
    pub(crate) fn missing(&self, info: &VmInfo) -> String {
        let name = self.pf.as_deref().unwrap_or_default();
        match info.sriov.iter().find(|pf| pf.id == name) {
            Some(pf) if pf.total_vfs > 0 => {
                format!("vfs {name}: there is no such VF; it has 0 to {}", pf.total_vfs - 1)
            }
            Some(_) => format!("vfs {name}: it has no VFs"),
            None if info.sriov.is_empty() => format!("vfs {name}: there are no PFs"),
            None => {
                let ids: Vec<_> = info.sriov.iter().map(|pf| pf.id.as_str()).collect();
                format!("vfs {name}: there is no such PF; there are {}", ids.join(", "))
            }
        }
    }
}

/// The rows for people.
pub(crate) fn text(rows: &[Row]) -> String {
    if rows.is_empty() {
        return "there are no PFs; boot a VM with a NIC that has sriov_vfs=\n".to_string();
    }
    let head = HEAD.map(str::to_string).to_vec();
    let cells: Vec<_> = std::iter::once(head).chain(rows.iter().map(cells)).collect();
    let notes: String = rows.iter().flat_map(notes).map(|note| format!("{note}\n")).collect();
    let between = if notes.is_empty() { "" } else { "\n" };
    format!("{}{between}{notes}", table(cells))
}

/// A table of at most [`WIDTH`] columns if the backends can be cut so far.
fn table(mut rows: Vec<Vec<String>>) -> String {
    let mut widths = [0; HEAD.len()];
    for row in &rows {
        widths.iter_mut().zip(row).for_each(|(width, cell)| *width = (*width).max(cell.chars().count()));
    }
    let total = |gap: usize, widths: &[usize]| widths.iter().sum::<usize>() + gap * (HEAD.len() - 1);
    let gap = if total(2, &widths) > WIDTH { 1 } else { 2 };
    let over = total(gap, &widths).saturating_sub(WIDTH);
    let room = widths[BACKEND].saturating_sub(over).max(LEAST);
    for row in &mut rows {
        row[BACKEND] = cut(&row[BACKEND], room);
    }
    widths[BACKEND] = widths[BACKEND].min(room);
    let line = |row: &Vec<String>| {
        let cells: Vec<_> = row.iter().zip(widths).map(|(cell, width)| format!("{cell:width$}")).collect();
        format!("{}\n", cells.join(&" ".repeat(gap)).trim_end())
    };
    rows.iter().map(line).collect()
}

/// A text of at most `room` characters.
fn cut(text: &str, room: usize) -> String {
    if text.chars().count() <= room {
        return text.to_string();
    }
    text.chars().take(room.saturating_sub(1)).chain(['\u{2026}']).collect()
}

fn cells(row: &Row) -> Vec<String> {
    let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_string());
    let state = match row.vfs {
        Some(VfNumbers { num_vfs, total_vfs }) => format!("{num_vfs} of {total_vfs}"),
        None if row.needs_reset => "needs reset".to_string(),
        None if row.stopped_by.is_some() => "stopped".to_string(),
        None => row.state.to_string(),
    };
    let is_mirrored = row.mirror != Mirror::Off;
    let flags = [('S', row.spoofchk), ('T', row.trust), ('I', row.isolated == Some(true)), ('M', is_mirrored)];
    let flags: String = flags.into_iter().filter_map(|(flag, on)| on.then_some(flag)).collect();
    let backend = row.backend.split(" (isolated)").next().unwrap_or_default();
    // The reason is a note.
    let backend = if row.backend.starts_with("missing") { "missing" } else { backend };
    vec![
        row.pf.clone(),
        or_dash(row.index.map(|index| index.to_string())),
        row.bdf.trim_start_matches("0000:").to_string(),
        state,
        row.mac.clone(),
        backend.to_string(),
        row.link.to_string(),
        or_dash(row.vlan.as_ref().map(|vlan| cut(&vlan.to_string(), LONGEST_VLAN))),
        or_dash((!flags.is_empty()).then_some(flags)),
        or_dash(rate(row)),
        or_dash(row.rates.map(|rates| scaled(rates.rx_bits_per_second))),
        or_dash(row.rates.map(|rates| scaled(rates.tx_bits_per_second))),
        or_dash(row.drops.as_ref().map(|drops| scaled(drops.values().sum::<u64>() as f64))),
    ]
}

/// Lines about a function that its row has no room for.
fn notes(row: &Row) -> Vec<String> {
    let name = row.function();
    let mut notes = Vec::new();
    if row.needs_reset {
        notes.push(format!("{name}: stopped until its driver resets it; unbind and bind the driver in the guest"));
    }
    if let Some(register) = row.stopped_by {
        notes.push(format!("{name}: stopped: {}", stop_cause(register)));
    }
    if let Some(reason) = row.backend.strip_prefix("missing ") {
        notes.push(format!("{name}: backend missing {reason}"));
    }
    if row.backend.contains("(lost)") {
        notes.push(format!("{name}: backend lost: {}", recovery(row)));
    }
    notes.extend(row.link_cause.iter().map(|cause| format!("{name}: link down: {cause}")));
    match row.mirror {
        Mirror::Off => {}
        Mirror::Pf => notes.push(format!("{name}: mirrored to {}", row.pf)),
        Mirror::Vf(index) => notes.push(format!("{name}: mirrored to {}v{index}", row.pf)),
    }
    let mut causes: Vec<_> = row.drops.iter().flatten().collect();
    causes.sort_by_key(|(_, count)| std::cmp::Reverse(**count));
    if !causes.is_empty() {
        let causes: Vec<_> = causes.iter().map(|(cause, count)| format!("{cause} {count}")).collect();
        notes.push(format!("{name}: dropped: {}", causes.join(", ")));
    }
    notes
}

/// Way back of a backend that is lost.
fn recovery(row: &Row) -> &'static str {
    match row.backend.split(' ').next() {
        // Only a driver's worker looks for a tap.
        Some("tap") => {
            "make the tap again (it is looked for while a driver runs, and when one starts), or give another by \
             set-vf --tap"
        }
        Some("fd") => "it was passed by descriptor; give another by set-vf --tap",
        _ => "it recovers when that is back, or give another by set-vf --tap",
    }
}

/// A register that stops queues, and its state.
const fn stop_cause(register: StoppedBy) -> &'static str {
    match register {
        StoppedBy::BusMaster => "Bus Master Enable is clear",
        StoppedBy::D3hot => "the function is in D3hot",
        StoppedBy::PfD3hot => "the PF is in D3hot",
    }
}

/// Guaranteed and highest rate: `100-500M`, `100M-`, `500M`.
fn rate(row: &Row) -> Option<String> {
    match (row.min_tx_rate.filter(|rate| *rate != 0), row.max_tx_rate) {
        (None, 0) => None,
        (None, most) => Some(format!("{most}M")),
        (Some(least), 0) => Some(format!("{least}M-")),
        (Some(least), most) => Some(format!("{least}-{most}M")),
    }
}

/// A number with a prefix of its unit, such as 1.5M.
fn scaled(number: f64) -> String {
    let (scaled, prefix) = match number {
        ..1e3 => return format!("{number:.0}"),
        ..1e6 => (number / 1e3, 'k'),
        ..1e9 => (number / 1e6, 'M'),
        _ => (number / 1e9, 'G'),
    };
    if scaled < 100.0 { format!("{scaled:.1}{prefix}") } else { format!("{scaled:.0}{prefix}") }
}

/// A text cut to a terminal of this many lines and columns. The last line says how many lines are not shown.
pub(crate) fn fit(text: &str, lines: usize, columns: usize) -> String {
    let all: Vec<_> = text.lines().map(|line| cut(line, columns.max(1))).collect();
    // The cursor is below the last line.
    let room = lines.saturating_sub(1);
    if all.len() <= room {
        return all.join("\n") + "\n";
    }
    let shown = room.saturating_sub(1);
    let more = format!("{} more lines; choose some, such as: vfs pf0 0-7", all.len() - shown);
    all.into_iter().take(shown).chain([cut(&more, columns.max(1))]).collect::<Vec<_>>().join("\n") + "\n"
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::remote::vfs::tests::info;
    use crate::remote::vfs::{Rates, rows};

    #[test]
    fn each_pf_and_each_of_its_vfs_has_a_line() {
        let mut rows = rows(&info(), None);
        rows[1].drops = Some(BTreeMap::from([("tx_bad_vlan", 3), ("tx_spoofed_mac", 9)]));
        let shown = text(&rows);
        let lines: Vec<_> = shown.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
        assert_eq!(
            lines,
            [
                "PF VF ADDRESS STATE MAC BACKEND LINK VLAN FLAGS RATE RX TX DROPS",
                "pf0 - 00:01.0 2 of 2 52:54:00:00:00:01 vhost-user /run/s\u{2026} down - - - - - -",
                "pf0 0 01:00.0 needs reset 52:54:00:00:01:00 tap t0v0 up 100 S 500M - - 12",
                "pf0 1 01:00.1 enabled 52:54:00:00:01:01 fd down [7,10-\u{2026} T - - - -",
                "pf0 2 01:00.2 running 52:54:00:00:01:02 switch pf0 up - SIM 100M- - - -",
                "",
                "pf0: backend lost: it recovers when that is back, or give another by set-vf --tap",
                "pf0v0: stopped until its driver resets it; unbind and bind the driver in the guest",
                "pf0v0: dropped: tx_spoofed_mac 9, tx_bad_vlan 3",
                "pf0v1: link down: its backend has set it down",
                "pf0v2: mirrored to pf0v0",
            ]
        );
    }

    #[test]
    fn a_vf_that_its_guest_stopped_has_the_register_as_cause() {
        let mut rows = rows(&info(), None);
        rows[3].stopped_by = Some(StoppedBy::BusMaster);
        rows[2].stopped_by = Some(StoppedBy::PfD3hot);
        let shown = text(&rows);
        assert!(shown.contains(" stopped  ") && shown.contains("\npf0v2: stopped: Bus Master Enable is clear\n"));
        assert!(shown.contains("\npf0v1: stopped: the PF is in D3hot\n"), "{shown}");
    }

    #[test]
    fn the_table_has_at_most_100_columns() {
        let mut rows = rows(&info(), None);
        for row in &mut rows {
            let bits = 999.9e6;
            let (rx_frames_per_second, tx_frames_per_second) = (1e6, 1e6);
            let (rx_bits_per_second, tx_bits_per_second) = (bits, bits);
            row.rates =
                Some(Rates { rx_bits_per_second, rx_frames_per_second, tx_bits_per_second, tx_frames_per_second });
            row.backend = format!("missing (--net-vf pf=pf0,index=0,tap=a: {})", "in use ".repeat(20));
            row.drops = Some(BTreeMap::from([("tx_spoofed_mac", 123_456_789)]));
        }
        rows[3].max_tx_rate = 500;
        rows[1].backend = format!("vhost-user /run/{}", "long/".repeat(20));
        let shown = text(&rows);
        let table: Vec<_> = shown.lines().take_while(|line| !line.is_empty()).collect();
        assert!(table.iter().all(|line| line.chars().count() <= WIDTH), "{shown}");
        assert!(table[2].contains("vhost-") && table[2].contains("\u{2026}") && table[3].contains(" missing "));
        assert!(shown.contains("\npf0v1: backend missing (--net-vf pf=pf0,index=0,tap=a: in use"), "{shown}");
    }

    #[test]
    fn a_choice_of_none_names_those_that_there_are() {
        let missing = |pf: &str| Choice { pf: Some(pf.into()), indices: Some("99".parse().unwrap()) }.missing(&info());
        assert_eq!(missing("pf0"), "vfs pf0: there is no such VF; it has 0 to 1");
        assert_eq!(missing("pf9"), "vfs pf9: there is no such PF; there are pf0");
    }

    #[test]
    fn rows_are_chosen_by_pf_and_indices() {
        let rows = rows(&info(), None);
        let count = |pf: &str, indices: Option<&str>| {
            let choice = Choice {
                pf: Some(pf.to_string()).filter(|pf| !pf.is_empty()),
                indices: indices.map(|text| text.parse().unwrap()),
            };
            rows.iter().filter(|row| choice.has(row)).count()
        };
        assert_eq!([count("", None), count("pf0", None), count("pf1", None)], [4, 4, 0]);
        assert_eq!([count("pf0", Some("1")), count("pf0", Some("0-1,2")), count("pf0", Some("5-9"))], [1, 3, 0]);
    }

    #[test]
    fn a_terminal_shows_how_many_lines_it_has_no_room_for() {
        let text: String = (0..9).map(|n| format!("line {n}\n")).collect();
        assert_eq!(fit(&text, 10, 80), text);
        let few = fit(&text, 5, 80);
        assert_eq!(few.lines().collect::<Vec<_>>()[..3], ["line 0", "line 1", "line 2"]);
        assert!(
            few.lines().count() == 4 && few.ends_with("6 more lines; choose some, such as: vfs pf0 0-7\n"),
            "{few}"
        );
        assert!(fit(&text, 0, 0).lines().count() <= 1);
        assert_eq!(fit("abcdef\n", 5, 4), "abc\u{2026}\n");
    }

    #[test]
    fn a_number_is_scaled_to_its_unit() {
        assert_eq!([0.0, 999.4, 1500.0, 2.5e6, 3e12].map(scaled), ["0", "999", "1.5k", "2.5M", "3000G"]);
    }
}
