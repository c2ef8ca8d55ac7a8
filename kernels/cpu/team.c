#include "team.h"

Team team;

void pagedray_use_team(Team of_torch) { team = of_torch; }
