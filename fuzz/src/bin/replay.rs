//! Runs all inputs of the corpora once, without a fuzzer: `replay <directory>` reads `<directory>/<target>/*`. Built
//! with coverage instrumentation, it shows the coverage of the corpora.

use std::path::Path;
use std::process::ExitCode;
use std::{env, fs, io};

use fuzz::TARGETS;

fn main() -> ExitCode {
    let Some(corpus) = env::args_os().nth(1) else {
        eprintln!("usage: replay <directory of the corpora>");
        return ExitCode::FAILURE;
    };
    match replay_all(Path::new(&corpus)) {
        Ok(inputs) => {
            println!("{inputs} inputs");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{}: cannot read the corpora: {error}", corpus.display());
            ExitCode::FAILURE
        }
    }
}

fn replay_all(corpus: &Path) -> io::Result<usize> {
    let mut inputs = 0;
    for target in TARGETS {
        for entry in fs::read_dir(corpus.join(target.name))? {
            (target.run)(&fs::read(entry?.path())?);
            inputs += 1;
        }
    }
    Ok(inputs)
}
