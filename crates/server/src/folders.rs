//! The folders of a cluster: what they are, how they are made for it, and how folders of older versions are adopted.
//!
//! A server never makes its own folder: an empty one may be a disk that is not mounted. All folders of a new cluster on one
//! machine are made together ([`make_all`]); on several machines each is made there ([`make_one`]), the metadata server's
//! first, which draws the identity of the cluster. A data server's folder that the metadata server knows is made again only
//! when it is said to be lost.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use impresario_base::machine::random_number;
use impresario_client::admin;
use impresario_config::{Config, Data, META_NAME, MovesTo, Server};
use impresario_store::{FolderIdentity, StoreError};
use impresario_transport::Access;
use impresario_wire::{ClusterId, KeyRole};

use crate::meta::{self, Stores};

/// How long the metadata server may take to say of which cluster it is.
const ASK_MAX: Duration = Duration::from_secs(5);

/// Why a folder is not made or adopted; one line with the remedy.
#[derive(Debug, thiserror::Error)]
pub enum FolderError {
    /// A data server's folder.
    #[error("{name}: {source}")]
    Data {
        /// The server.
        name: String,
        /// What is wrong.
        source: StoreError,
    },
    /// The metadata server's folder.
    #[error("{META_NAME}: {0}")]
    Meta(#[from] meta::StartError),
    /// It must not be done.
    #[error("{0}")]
    Refused(String),
}

/// What a folder is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum State {
    /// Missing or empty.
    Blank,
    /// Of a version without identities.
    Older,
    /// Made for a server of a cluster.
    Made {
        /// The cluster.
        cluster: ClusterId,
        /// Name of the server that it was made for.
        server: String,
        /// Number of a data server's folder.
        store: Option<u64>,
    },
}

/// A folder of a configuration.
#[derive(Debug)]
pub struct Folder {
    /// The server.
    pub name: String,
    /// Where it is on this machine, or would be.
    pub dir: PathBuf,
    /// What it is; an error is a folder of something else.
    pub state: Result<State, FolderError>,
}

/// What part a data server's folder has in a move.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Passage {
    /// It is being filled.
    Arriving {
        /// Number of the move.
        number: u64,
        /// All is there, but its server may not have left its old folder.
        is_complete: bool,
    },
    /// Its server has left.
    Departed {
        /// Number of the move.
        number: u64,
        /// Where the server is now.
        address: String,
    },
}

/// What part a folder has in a move; `None`: none any more.
pub fn passage(name: &str, dir: &Path) -> Result<Option<Passage>, FolderError> {
    let failed = |source| FolderError::Data { name: name.into(), source };
    if let Some(departed) = impresario_store::departed(dir).map_err(failed)? {
        return Ok(Some(Passage::Departed { number: departed.number, address: departed.address }));
    }
    let arriving = impresario_store::arriving(dir).map_err(failed)?;
    Ok(arriving.map(|found| Passage::Arriving { number: found.number, is_complete: found.is_complete }))
}

/// The folders of a configuration as they are on this machine, the metadata server's first. Of a data server that moves also the
/// one to which it moves, once there is something. Servers of a tree have none.
pub fn survey(config: &Config) -> Vec<Folder> {
    if config.tree.is_some() {
        return Vec::new();
    }
    let meta = Folder { name: META_NAME.into(), dir: config.meta.dir.clone(), state: meta_state(&config.meta.dir) };
    let data = config.data.iter().filter(|data| !data.is_retired()).flat_map(|data| {
        let folder =
            |dir: &PathBuf| Folder { name: data.name.clone(), dir: dir.clone(), state: data_state(&data.name, dir) };
        let to = data.moves_to.as_ref().map(|to| &to.dir).filter(|dir| **dir != data.dir);
        let to = to.map(folder).filter(|folder| !matches!(folder.state, Ok(State::Blank)));
        std::iter::once(folder(&data.dir)).chain(to)
    });
    std::iter::once(meta).chain(data).collect()
}

/// Where a data server runs: where it has moved to, once its objects are there, else where it was.
pub(crate) fn place_of(data: &Data) -> Result<Data, StoreError> {
    match &data.moves_to {
        Some(to) if arrived_of(to)?.as_ref() == Some(&data.name) => {
            Ok(Data { address: to.address.clone(), dir: to.dir.clone(), moves_to: None, ..data.clone() })
        }
        _ => Ok(data.clone()),
    }
}

/// The server whose objects have arrived at this place, if any have.
pub(crate) fn arrived_of(to: &MovesTo) -> Result<Option<String>, StoreError> {
    if impresario_store::arrived(&to.dir)?.is_none_or(|arrived| arrived.address != to.address) {
        return Ok(None);
    }
    Ok(match impresario_store::examine(&to.dir)? {
        impresario_store::FolderState::Made(made) => Some(made.server),
        _ => None,
    })
}

fn meta_state(dir: &Path) -> Result<State, FolderError> {
    Ok(match meta::examine(dir)? {
        meta::FolderState::Blank => State::Blank,
        meta::FolderState::Older => State::Older,
        meta::FolderState::Made(cluster) => State::Made { cluster, server: META_NAME.into(), store: None },
    })
}

fn data_state(name: &str, dir: &Path) -> Result<State, FolderError> {
    use impresario_store::FolderState;
    Ok(match impresario_store::examine(dir).map_err(|source| FolderError::Data { name: name.into(), source })? {
        FolderState::Blank => State::Blank,
        FolderState::Older => State::Older,
        FolderState::Made(FolderIdentity { cluster, store, server }) => {
            State::Made { cluster: ClusterId(cluster), server, store: Some(store) }
        }
    })
}

/// Makes all folders of a cluster that has none yet, on this machine. `None`: it has all of them already. A cluster of which
/// some are missing is left alone.
pub fn make_all(config: &Config) -> Result<Option<ClusterId>, FolderError> {
    if !is_to_be_made(config)? {
        return Ok(None);
    }
    // While this one makes them no other does.
    let meta = meta::Claimed::take(&config.meta.dir)?;
    if !is_to_be_made(config)? {
        return Ok(None);
    }
    // So that they can be made once there is space, say, and are not taken for those of a cluster that has lost others.
    let unmake = || config.data.iter().for_each(|data| drop(impresario_store::unmake(&data.dir)));
    unmake();
    let cluster = ClusterId(draw()?);
    make_blank(config, cluster, &meta).inspect_err(|_| unmake())?;
    Ok(Some(cluster))
}

/// Whether no folder of the cluster has been made, or their making was interrupted: that of the metadata folder, which is begun
/// first and ends last, and no data server has served any of the others yet. An error if only some are missing otherwise.
fn is_to_be_made(config: &Config) -> Result<bool, FolderError> {
    let (mut blank, mut others, mut is_interrupted) = (Vec::new(), Vec::new(), meta::is_begun(&config.meta.dir));
    for Folder { name, dir, state } in survey(config) {
        let state = state?;
        if state == State::Blank {
            blank.push((name, dir));
        } else {
            is_interrupted &= matches!(state, State::Made { store: Some(_), .. }) && !impresario_store::is_served(&dir);
            others.push(name);
        }
    }
    if blank.is_empty() || others.is_empty() || is_interrupted {
        return Ok(!blank.is_empty());
    }
    let blank: Vec<String> = blank.iter().map(|(name, dir)| format!("{name} ({})", dir.display())).collect();
    Err(FolderError::Refused(format!(
        "{} {} empty, but {} not: are all disks mounted? A folder that is lost for good is made again with \
         `impresario store init --name NAME --replace`, and what it held is lost",
        blank.join(", "),
        if blank.len() == 1 { "is" } else { "are" },
        if others.len() == 1 { format!("{} is", others[0]) } else { format!("{} are", others.join(", ")) },
    )))
}

fn make_blank(config: &Config, cluster: ClusterId, meta: &meta::Claimed) -> Result<(), FolderError> {
    let mut stores = BTreeMap::new();
    for data in config.data.iter().filter(|data| !data.is_retired()) {
        let store = draw()?;
        make_data(&data.name, &data.dir, cluster, store)?;
        stores.insert(data.name.clone(), store);
    }
    // Last: without it the cluster does not exist.
    Ok(meta.make(cluster, &stores)?)
}

/// Makes the folder of one server of a configuration, of a new cluster (the metadata server's) or of one that exists. The
/// identity of the cluster is taken from the metadata folder or its running server unless it is given. `replace`: the server
/// had a folder, which is lost.
pub fn make_one(
    config: &Config,
    name: &str,
    cluster: Option<ClusterId>,
    replace: bool,
) -> Result<ClusterId, FolderError> {
    match config.server(name).map_err(FolderError::Refused)? {
        Server::Meta(meta) => {
            let made = |data: &impresario_config::Data| match data_state(&data.name, &data.dir) {
                Ok(State::Made { cluster, .. }) => Some((data.name.clone(), cluster)),
                _ => None,
            };
            if let Some((other, theirs)) = config.data.iter().find_map(made).filter(|_| cluster.is_none()) {
                return Err(FolderError::Refused(format!(
                    "the folder of {other} is that of cluster {theirs}: is the disk of the metadata folder {} mounted? If \
                     all names of that cluster are lost for good, add --cluster {theirs}",
                    meta.dir.display()
                )));
            }
            let cluster = match cluster {
                Some(cluster) => cluster,
                None => ClusterId(draw()?),
            };
            meta::make(&meta.dir, cluster, &BTreeMap::new())?;
            Ok(cluster)
        }
        Server::Data(_, data) => {
            if data.is_retired() {
                return Err(FolderError::Refused(format!("{name} is retired in the configuration and has no folder")));
            }
            let known = known(config, cluster)?;
            let store = match known.stores.get(name) {
                Some(_) if !replace => {
                    return Err(FolderError::Refused(format!(
                        "cluster {} has a folder of {name} already: is the disk of {} mounted? If the folder is lost for \
                         good, add --replace: files with data in it then give I/O errors",
                        known.cluster,
                        data.dir.display()
                    )));
                }
                Some(store) => *store,
                None => draw()?,
            };
            make_data(name, &data.dir, known.cluster, store)?;
            Ok(known.cluster)
        }
        Server::Io(..) => Err(FolderError::Refused(format!("{name} is an I/O node and has no folder"))),
    }
}

/// Gives the folder of one server, of an older version or of a server that was renamed, to the cluster.
pub fn adopt_one(config: &Config, name: &str, cluster: Option<ClusterId>) -> Result<ClusterId, FolderError> {
    match config.server(name).map_err(FolderError::Refused)? {
        Server::Meta(meta) => {
            let cluster = match cluster {
                Some(cluster) => cluster,
                None => ClusterId(draw()?),
            };
            meta::adopt(&meta.dir, cluster, &BTreeMap::new())?;
            Ok(cluster)
        }
        Server::Data(_, data) => {
            let known = known(config, cluster)?;
            let failed = |source| FolderError::Data { name: name.into(), source };
            let store = match data_state(name, &data.dir)? {
                State::Made { cluster, store: Some(store), .. } if cluster == known.cluster => store,
                State::Older => {
                    check_keys(name, &data.dir, &known)?;
                    match known.stores.get(name) {
                        Some(store) => *store,
                        None => draw()?,
                    }
                }
                // Says so.
                _ => 1,
            };
            let identity = FolderIdentity { cluster: known.cluster.0, store, server: name.into() };
            impresario_store::adopt(&data.dir, &identity).map_err(failed)?;
            Ok(known.cluster)
        }
        Server::Io(..) => Err(FolderError::Refused(format!("{name} is an I/O node and has no folder"))),
    }
}

/// The objects of a folder without an identity must be of files of this cluster.
fn check_keys(name: &str, dir: &Path, known: &Known) -> Result<(), FolderError> {
    let keys = impresario_store::any_key(dir).map_err(|source| FolderError::Data { name: name.into(), source })?;
    match (keys, known.key_prefix) {
        (Some(key), Some(prefix)) if key >> meta::COUNT_BITS != prefix => Err(FolderError::Refused(format!(
            "the folder {} holds the objects of another cluster ({key:016x}; keys of cluster {} begin with {prefix:06x}); \
             correct `dir` of {name}",
            dir.display(),
            known.cluster
        ))),
        _ => Ok(()),
    }
}

/// What is known of a cluster beside its configuration.
struct Known {
    cluster: ClusterId,
    stores: BTreeMap<String, u64>,
    key_prefix: Option<u64>,
}

/// From the metadata folder, if it is on this machine, else from its server, else only what the caller says.
fn known(config: &Config, cluster: Option<ClusterId>) -> Result<Known, FolderError> {
    let found = match meta::examine(&config.meta.dir) {
        // On this machine it may be something else, or closed to this user.
        Err(error) => ask(config).map_err(|why| format!("{error}; and {why}")),
        Ok(meta::FolderState::Made(_)) => {
            let stores = Stores::open(&config.meta.dir)?;
            let key_prefix = Some(meta::key_prefix(&config.meta.dir)?);
            Ok(Known { cluster: stores.cluster(), stores: stores.known(), key_prefix })
        }
        Ok(meta::FolderState::Older) => return Err(meta::StartError::Older { dir: config.meta.dir.clone() }.into()),
        Ok(meta::FolderState::Blank) => ask(config),
    };
    match (found, cluster) {
        (Ok(known), Some(wanted)) if known.cluster != wanted => Err(FolderError::Refused(format!(
            "the metadata server is that of cluster {}, not of {wanted}; leave out --cluster",
            known.cluster
        ))),
        (Ok(known), _) => Ok(known),
        (Err(_), Some(cluster)) => Ok(Known { cluster, stores: BTreeMap::new(), key_prefix: None }),
        (Err(why), None) => Err(FolderError::Refused(format!(
            "the identity of the cluster is not known here: {why}; make the metadata folder first, start its server, or name \
             the cluster with --cluster"
        ))),
    }
}

/// Asks the running metadata server.
fn ask(config: &Config) -> Result<Known, String> {
    let status = admin::status(&Access::of(config, KeyRole::Server), &config.meta.address, ASK_MAX)
        .map_err(|error| error.to_string())?;
    let status: serde_json::Value = serde_json::from_str(&status).map_err(|error| error.to_string())?;
    let number = |value: &serde_json::Value| u64::from_str_radix(value.as_str()?, 16).ok();
    let cluster = status.get("cluster").and_then(|text| text.as_str()?.parse().ok());
    let stores = status.get("stores").and_then(|stores| {
        stores.as_object()?.iter().map(|(name, store)| Some((name.clone(), number(store)?))).collect::<Option<_>>()
    });
    match (cluster, stores) {
        (Some(cluster), Some(stores)) => {
            Ok(Known { cluster, stores, key_prefix: status.get("key_prefix").and_then(number) })
        }
        _ => Err(format!("what answers at {} is no metadata server of this version", config.meta.address)),
    }
}

fn make_data(name: &str, dir: &Path, cluster: ClusterId, store: u64) -> Result<(), FolderError> {
    let identity = FolderIdentity { cluster: cluster.0, store, server: name.into() };
    impresario_store::make(dir, &identity).map_err(|source| FolderError::Data { name: name.into(), source })
}

/// A number that no other folder has; never 0.
fn draw() -> Result<u64, FolderError> {
    random_number().map_err(|error| FolderError::Refused(format!("no number can be drawn for a folder: {error}")))
}
