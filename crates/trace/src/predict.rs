//! What recorded runs foretell a scheduler: traces become predicted queues.

use std::path::Path;

use impresario_foresight::{PredictedQueues, Recorded};

use crate::combine::average;
use crate::live::key_of_name;
use crate::{FileInfo, Header, Reader, Trace, TraceError, TraceOp};

/// The predicted queues of a trace: its reads and writes, files by their stable keys, or by their names where a trace has no
/// keys.
pub fn predicted_queues(trace: &Trace) -> PredictedQueues {
    predicted_queues_by(trace, |file| if file.key == 0 { key_of_name(&file.path) } else { file.key })
}

/// The same with keys of the caller.
pub fn predicted_queues_by(trace: &Trace, key: impl Fn(&FileInfo) -> u64) -> PredictedQueues {
    PredictedQueues::new(trace.records.iter().filter(|r| r.op.is_data()).map(|r| Recorded {
        file: key(trace.file(r.file)),
        write: r.op == TraceOp::Write,
        offset: r.offset,
        len: r.len,
        arrival_ns: r.arrival.0,
        completed_ns: r.completion().map(|c| c.0),
    }))
}

/// Several runs as one: arrivals and completions are their means (agios-2013, IV.A). Of one run it is that run.
pub fn mean_of(mut runs: Vec<Trace>) -> Result<Trace, String> {
    if runs.len() == 1
        && let Some(run) = runs.pop()
    {
        return Ok(run);
    }
    average(&runs).map(|mean| mean.trace)
}

/// Reads the traces of earlier runs. `fits` judges where each is from; its refusal is part of the error. A trace whose
/// writer was killed counts as far as it goes; one that is damaged, of a later version, or no trace is an error.
pub fn load_runs<P: AsRef<Path>>(
    paths: &[P],
    fits: impl Fn(&Header) -> Result<(), String>,
) -> Result<PredictedQueues, TraceError> {
    let mut runs = Vec::with_capacity(paths.len());
    for path in paths {
        let reader = Reader::open(path.as_ref())?;
        fits(reader.header()).map_err(|why| TraceError::file(path.as_ref(), format!("{why}; nothing is predicted")))?;
        runs.push(Trace::read(reader)?);
    }
    let first = paths.first().map_or(Path::new(""), |p| p.as_ref());
    let mean = mean_of(runs).map_err(|why| TraceError::file(first, why))?;
    Ok(predicted_queues(&mean))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::varied;

    #[test]
    fn traces_become_predicted_queues_or_a_message() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let trace = varied();
        trace.save(path("a.imt")).unwrap();
        trace.save(path("b.imt")).unwrap();
        let data = trace.records.iter().filter(|r| r.op.is_data() && r.len > 0).count();
        assert!(data > 0);
        let any = |_: &Header| Ok(());
        assert_eq!(load_runs(&[path("a.imt")], any).unwrap().len(), data);
        assert_eq!(load_runs(&[path("a.imt"), path("b.imt")], any).unwrap().len(), data);
        let refused = |name: &str| load_runs(&[path(name)], any).unwrap_err().to_string();
        let of_another = load_runs(&[path("a.imt")], |_| Err("it was written by another server".into()));
        assert!(of_another.unwrap_err().to_string().ends_with("another server; nothing is predicted"));
        let bytes = std::fs::read(path("a.imt")).unwrap();
        // Cut short it counts up to the last whole block; with a wrong byte it does not.
        std::fs::write(path("cut.imt"), &bytes[..bytes.len() - 3]).unwrap();
        assert_eq!(load_runs(&[path("cut.imt")], any).unwrap().len(), data);
        let mut wrong = bytes.clone();
        wrong[bytes.len() / 2] ^= 0x55;
        std::fs::write(path("wrong.imt"), &wrong).unwrap();
        assert!(refused("wrong.imt").contains("at byte"), "{}", refused("wrong.imt"));
        wrong.clone_from(&bytes);
        wrong[7] = 9;
        std::fs::write(path("later.imt"), &wrong).unwrap();
        assert!(refused("later.imt").contains("version 9"), "{}", refused("later.imt"));
        std::fs::write(path("text.imt"), "hello, this is no trace").unwrap();
        assert!(refused("text.imt").contains("text.imt"));
        assert!(refused("none.imt").contains("No such file"));
    }
}
