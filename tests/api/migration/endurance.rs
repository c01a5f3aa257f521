//! A guest that migrates repeatedly between two programs, whose resources do not grow.

use std::fs;
use std::time::Instant;

use serde_json::json;

use crate::migration::pages::{MEMORY, Pair, counter, receive};
use crate::migration::{url, wait_for_state};
use crate::repeat::repetitions;
use crate::rig::vmm::{Vmm, wait_for};

/// After this number of rounds, nothing may grow.
const SETTLED: usize = 4;

/// Number of migrations there and back; `CH_MIGRATIONS=200` for a longer run.
fn rounds() -> usize {
    repetitions("CH_MIGRATIONS", 10).div_ceil(2)
}

/// Resources of a program: open files, threads, and private memory in KiB.
fn usage(vmm: &Vmm) -> (usize, usize, u64) {
    let status = fs::read_to_string(format!("/proc/{}/status", vmm.pid())).unwrap();
    // Without the guest's memory, which is a file.
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    (vmm.open_files(), vmm.threads().len(), line.trim().trim_end_matches(" kB").parse().unwrap())
}

/// Migrates the guest. Returns the downtime, in microseconds.
fn moves(from: &Vmm, to: &Vmm, tap: &str) -> u64 {
    to.files.sparse("ram", MEMORY);
    receive(to, tap);
    let mut client = from.client();
    client.put_json("vm.send-migration", &json!({"destination_url": url(to)})).expect(204);
    let sent = wait_for_state(&mut client, "finished");
    wait_for_state(&mut to.client(), "finished");
    let counted = counter(to);
    wait_for("the guest", || counter(to) != counted);
    client.get("vm.info").expect(404);
    sent["downtime"]["total_us"].as_u64().unwrap()
}

#[test]
fn a_guest_that_moves_to_and_fro_leaves_nothing_behind() {
    let pair = Pair::start("fro", "");
    let (mut downtimes, mut settled, began) = (Vec::new(), None, Instant::now());
    for round in 1..=rounds() {
        downtimes.push(moves(&pair.source, &pair.target, "fro0t"));
        downtimes.push(moves(&pair.target, &pair.source, "fro0"));
        if round >= SETTLED {
            let places = [&pair.source, &pair.target];
            let before = *settled.get_or_insert_with(|| places.map(usage));
            // A thread whose work is done may not have ended yet.
            wait_for(&format!("round {round}: no more than {before:?}"), || {
                places.map(usage).into_iter().zip(before).all(|(now, before)| {
                    // An allocator keeps some of the freed memory.
                    now.0 <= before.0 && now.1 <= before.1 && now.2 <= before.2 + 8192
                })
            });
        }
    }
    let now = [&pair.source, &pair.target].map(usage);
    downtimes.sort_unstable();
    println!(
        "{} moves in {:?}; was paused for {} to {} us, median {}; \
         files, threads, KiB: {settled:?}, at the end {now:?}",
        downtimes.len(),
        began.elapsed(),
        downtimes[0],
        downtimes[downtimes.len() - 1],
        downtimes[downtimes.len() / 2]
    );
}
