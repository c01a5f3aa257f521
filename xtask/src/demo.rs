//! The demonstration: `tests/integration/src/bin/demo.rs`, run where guests can run.

use std::path::Path;
use std::time::{Duration, Instant};

use crate::build;
use crate::error::{Error, Result};
use crate::lab::Lab;
use crate::place::Place;
use crate::progress::{Step, note, seconds};
use crate::suite::{environment, quote};

/// How long the demonstration may take once the lab is up.
const LIMIT: Duration = Duration::from_secs(180);

/// Sets up what is needed and runs the demonstration. It tells whether it passed.
pub fn run(workspace: &Path, asked: Option<Place>) -> Result<bool> {
    let started = Instant::now();
    let lab = Lab::prepare(workspace)?;
    let binaries = build::static_binaries(workspace, false)?;
    let place = Place::decide(asked, &lab, &binaries.vmm)?;
    let step = Step::begin("lab", "a machine with a KVM that works");
    let mut worker = place.worker(&lab, workspace, 0)?;
    step.done();
    let command = environment(&lab, &binaries) + &quote(&binaries.demo);
    let status = worker.run(&command, LIMIT, &mut |line| println!("{line}"));
    let status =
        status.map_err(|lost| Error::new(format!("the demonstration did not end: {}", lost.explain(LIMIT))))?;
    note("done", seconds(started.elapsed()));
    println!("{}", if status == 0 { "PASS" } else { "FAIL" });
    Ok(status == 0)
}
