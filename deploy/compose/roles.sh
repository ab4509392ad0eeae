#!/usr/bin/env bash
# Run once by the image of PostgreSQL, when the database is made: who owns the tables, and the role
# that the service works as. psql quotes the passwords.
set -eo pipefail

psql -v ON_ERROR_STOP=1 -U "${POSTGRES_USER:?}" -d "${POSTGRES_DB:?}" \
  -v database="$POSTGRES_DB" -v owner="${OWNER_PASSWORD:?}" -v app="${APP_PASSWORD:?}" <<'SQL'
CREATE ROLE affidavit_owner LOGIN PASSWORD :'owner';
CREATE ROLE affidavit_app LOGIN PASSWORD :'app';
ALTER DATABASE :"database" OWNER TO affidavit_owner;
ALTER SCHEMA public OWNER TO affidavit_owner;
SQL
